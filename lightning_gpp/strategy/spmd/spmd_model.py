"""The divided model as one rank has it: exports, programs, and the halves of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.emulation.real_time import RealTime
from lightning_gpp.runtime.collectives.process_collectives import ProcessCollectives
from lightning_gpp.spmd.operator_graph import SpmdGraph, ValueSource
from lightning_gpp.spmd.program import SpmdProgram
from lightning_gpp.spmd.run.interpreter import Interpreter
from lightning_gpp.spmd.run.operator_calls import OperatorCall
from lightning_gpp.spmd.run.program_run import ProgramRun
from lightning_gpp.strategy.ranks.control import Control
from lightning_gpp.strategy.spmd.sharded_partition import ShardedPartition
from lightning_gpp.strategy.step.pipelined_call import CallBoundary


@dataclass(frozen=True, slots=True)
class ProgramPackage:
    """What ranks other than 0 need of an export, and what all ranks do with it.

    Attributes:
        graph: the operators.
        calls: how they are called.
        constants: tensors that the forward makes of Python data.
        program: what all ranks do.
    """

    graph: SpmdGraph
    calls: tuple[OperatorCall, ...]
    constants: Mapping[str, Tensor]
    program: SpmdProgram


@dataclass(slots=True)
class SpmdModel:
    """The model on this rank.

    Attributes:
        partition: what this rank holds.
        collectives: with the other ranks.
        control: likewise, for what is no part of the program.
        prefix: of the divided module's names in the LightningModule.
        device: of this rank.
        interpreters: one per export, in their order.
        time: in which calls run; that of emulated devices, if they are.
    """

    partition: ShardedPartition
    collectives: ProcessCollectives
    control: Control
    prefix: str
    device: torch.device
    interpreters: list[tuple[Interpreter, Mapping[str, Tensor]]] = field(default_factory=list)
    time: RealTime[Interpreter] = field(default_factory=RealTime)

    def add(self, package: ProgramPackage) -> None:
        """Takes another export."""
        interpreter = Interpreter(
            package.graph, package.calls, package.program, self.collectives, self.device
        )
        constants = {name: value.to(self.device) for name, value in package.constants.items()}
        self.interpreters.append((interpreter, constants))

    def halves(self, number: int, seed: int, boundary: SpmdBoundary | None) -> SpmdHalves:
        """A call of an export, of which nothing has run."""
        interpreter, constants = self.interpreters[number]
        self.partition.agree_on_gradients()
        stored = dict(constants)
        for source in (ValueSource.PARAMETER, ValueSource.BUFFER):
            for value in interpreter.graph.of_source(source):
                if value.name not in constants:
                    stored[value.name] = self.partition.stored(self.prefix + value.name)
        return SpmdHalves(interpreter, stored, seed, boundary, self.control)

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
        """The backward; parameters and rank 0's arguments have their gradients after it."""
        assert self._run is not None, "forward_half comes first"
        given: Mapping[str, Any] = {}
        if self.boundary is not None:
            given = {n: column[0] for n, column in self.boundary.output_gradients(0).items()}
        reached = self._reached(self._run, given)
        if reached:
            gradients = {name: given[name].to(self.interpreter.device) for name in reached if given}
            self._run.backward(reached, gradients, retain=retain)
        if not retain:
            self._run = None

    def _reached(self, run: ProgramRun, given: Mapping[str, Any]) -> list[str]:
        """All ranks: results that rank 0's loss depends on; the backward starts from the same."""
        flags = [
            given.get(name) is not None and result.requires_grad
            for name, result in run.results.items()
        ]
        if self.control.is_leader:
            self.control.tell(flags)
        else:
            flags = self.control.hear("which results have gradients")
        return [name for name, flag in zip(run.results, flags, strict=True) if flag]
