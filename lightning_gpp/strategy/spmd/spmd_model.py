"""The divided model as one rank has it: exports, programs, and the halves of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from lightning_gpp.emulation.real_time import RealTime
from lightning_gpp.runtime.collectives.process_collectives import ProcessCollectives
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.program import SpmdProgram
from lightning_gpp.spmd.run.interpreter import Interpreter, ProgramRun
from lightning_gpp.strategy.ranks.control import Control
from lightning_gpp.strategy.spmd.sharded import ShardedPartition
from lightning_gpp.strategy.step.pipelined_call import CallBoundary


@dataclass(frozen=True, slots=True)
class ProgramPackage:
    """What ranks other than 0 need of an export, and what all ranks do with it.

    Attributes:
        graph: the operators, and how they are called.
        constants: tensors that the forward makes of Python data.
        program: what all ranks do.
    """

    graph: SpmdGraph
    constants: Mapping[str, Tensor]
    program: SpmdProgram


@dataclass(slots=True)
class SpmdModel:
    """The model on this rank.

    Attributes:
        partition: what this rank holds.
        collectives: with the other ranks.
        prefix: of the divided module's names in the LightningModule.
        time: in which calls run; that of emulated devices, if they are.
        interpreters: one per export, in their order, with its constants.
    """

    partition: ShardedPartition
    collectives: ProcessCollectives
    prefix: str
    time: RealTime[Interpreter]
    interpreters: list[tuple[Interpreter, dict[str, Tensor]]] = field(default_factory=list)

    def close(self) -> None:
        """All ranks: gives the process group back."""
        self.collectives.close()


@dataclass(slots=True)
class SpmdBoundary(CallBoundary):
    """Where one call of the forward meets the program, on rank 0; the batch is one piece."""

    @classmethod
    def whole(cls, inputs: Mapping[str, Tensor], needs: frozenset[str]) -> SpmdBoundary:
        """The boundary of a call.

        Args:
            inputs: its tensor arguments by name.
            needs: those that need a gradient.
        """
        leaves = {n: tensor.detach().requires_grad_(n in needs) for n, tensor in inputs.items()}
        return cls([leaves], [1], {}, {})

    def take_input_gradients(self, name: str) -> Tensor | None:
        """The gradient of an argument."""
        leaf = self.pieces[0][name]
        gradient, leaf.grad = leaf.grad, None
        return gradient


@dataclass(slots=True)
class SpmdHalves:
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
    boundary: SpmdBoundary | None
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
        run, given = self._run, dict[str, Tensor]()
        assert run is not None, "forward_half comes first"
        if self.boundary is not None:
            columns = {n: column[0] for n, column in self.boundary.output_gradients(0).items()}
            given = {n: gradient for n, gradient in columns.items() if gradient is not None}
        flows = [n for n, result in run.results.items() if result.requires_grad]
        reached: list[str] = [name for name in flows if name in given]
        if self.control.is_leader:
            self.control.tell(reached)
        else:
            reached = self.control.hear("which results have gradients")
        if reached:
            run.backward(reached, {n: given[n] for n in reached if given}, retain=retain)
        if not retain:
            self._run = None
