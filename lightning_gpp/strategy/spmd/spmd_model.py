"""The divided model on one rank: exports, programs, and the halves of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_gpp.emulation.real_time import RealTime
from lightning_gpp.runtime.collectives import ProcessCollectives
from lightning_gpp.runtime.gradients import GradientStash
from lightning_gpp.spmd.operator_graph import SpmdGraph, ValueSource
from lightning_gpp.spmd.program import SpmdProgram
from lightning_gpp.spmd.run.interpreter import Interpreter, ProgramRun
from lightning_gpp.strategy.ranks.control import Control
from lightning_gpp.strategy.ranks.messages import Forward
from lightning_gpp.strategy.spmd.sharded import ShardedPartition
from lightning_gpp.strategy.state.held_elsewhere import lifted
from lightning_gpp.strategy.state.optimizers import PartialOptimizer
from lightning_gpp.strategy.step.pipelined_call import CallBoundary, RankCall


@dataclass(frozen=True, slots=True)
class ProgramPackage:
    """What rank 0 sends of an export to all ranks.

    Attributes:
        graph: the operators, and how they are called.
        constants: tensors that the forward makes of Python data.
        program: what all ranks do.
    """

    graph: SpmdGraph
    constants: Mapping[str, Tensor]
    program: SpmdProgram


@dataclass(frozen=True, slots=True)
class SpmdForward(Forward):
    """A call of a divided forward.

    Attributes:
        export: number of the export.
        seed: of random numbers.
    """

    export: int = 0
    seed: int = 0


@dataclass(slots=True)
class SpmdModel:
    """The model on this rank.

    Attributes:
        partition: what this rank holds.
        group: the ranks.
        prefix: of the divided module's names in the LightningModule.
        time: in which steps run, which is real.
        optimizers: of the parameters that this rank has, or has parts of.
        interpreters: one per export, in their order, with its constants.
    """

    partition: ShardedPartition
    group: ProcessCollectives
    prefix: str
    time: RealTime = field(default_factory=RealTime)
    optimizers: list[PartialOptimizer] = field(default_factory=list)
    interpreters: list[tuple[Interpreter, dict[str, Tensor]]] = field(default_factory=list)

    def add(self, package: ProgramPackage) -> None:
        """Another export can be called."""
        device = self.partition.device
        there = {name: value.to(device) for name, value in package.constants.items()}
        interpreter = Interpreter(package.graph, package.program, self.group, device)
        self.interpreters.append((interpreter, there))

    def call(self, message: Forward, boundary: CallBoundary | None) -> RankCall:
        """A call of the forward that backwards may follow; nothing of it runs yet."""
        halves = self._halves(message, boundary)
        return RankCall(halves, _PartsStash(self.partition), lambda *_: lifted())

    def forward(self, message: Forward, boundary: CallBoundary | None) -> None:
        """Runs a call of the forward that no backward follows."""
        halves = self._halves(message, boundary)
        with torch.no_grad(), message.autocast.on(self.partition.device), lifted():
            halves.forward_half()

    def _halves(self, message: Forward, boundary: CallBoundary | None) -> _Halves:
        assert isinstance(message, SpmdForward)
        for partial in self.optimizers:
            partial.adopt_new_groups()
        self.partition.agree_on_gradients()
        interpreter, constants = self.interpreters[message.export]
        stored = {
            value.name: self.partition.stored(self.prefix + value.name)
            for value in interpreter.graph.values
            if value.source in (ValueSource.PARAMETER, ValueSource.BUFFER)
            and value.name not in constants
        }
        values, control = constants | stored, self.partition.control
        return _Halves(interpreter, values, message.seed, boundary, control)

    def close(self) -> None:
        """All ranks: gives the process group back."""
        self.group.close()


class _PartsStash(GradientStash):
    """Gradients of a call, apart; those that user code has cleared in the module are cleared."""

    def __init__(self, partition: ShardedPartition) -> None:
        super().__init__(partition.held_parameters())
        self._partition = partition

    def __enter__(self) -> _PartsStash:
        self._partition.clear_gradients()
        super().__enter__()
        return self

    def hand_out(self, factor: Tensor | None = None) -> None:
        """Adds the gradients to those that there are."""
        super().hand_out(factor)
        self._partition.show_gradients()


@dataclass(slots=True)
class _Halves:
    """One call of an export on this rank, from its forward to its backwards.

    Attributes:
        interpreter: runs it.
        stored: this rank's parts of parameters, buffers and constants.
        seed: of random numbers.
        boundary: the arguments and results, on rank 0.
        control: between rank 0 and the others.
    """

    interpreter: Interpreter
    stored: Mapping[str, Tensor]
    seed: int
    boundary: CallBoundary | None
    control: Control
    _run: ProgramRun | None = None

    def forward_half(self) -> None:
        """The forward; rank 0 has the results."""
        inputs = None if self.boundary is None else self.boundary.start(0)
        self._run = self.interpreter.run(self.stored, inputs, seed=self.seed)
        if self.boundary is not None:
            self.boundary.finish(0, dict(self._run.results))

    def backward_half(self, *, retain: bool) -> None:
        """The backward; parameters and rank 0's arguments have their gradients after it.

        All ranks go backward from the results that rank 0's loss depends on.
        """
        run, given, reached = self._run, dict[str, Tensor](), list[str]()
        assert run is not None, "forward_half comes first"
        if self.boundary is not None:
            columns = {n: column[0] for n, column in self.boundary.output_gradients(0).items()}
            given = {n: gradient for n, gradient in columns.items() if gradient is not None}
            reached = [
                n for n, result in run.results.items() if result.requires_grad and n in given
            ]
            self.control.tell(reached)
        else:
            reached = self.control.hear("which results have gradients")
        run.backward(reached, given, retain=retain)
        if not retain:
            self._run = None
