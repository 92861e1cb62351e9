"""One forward of a program on one device, and its backward: instruction by instruction, backwards.

Autograd has the operators one at a time; what follows what is up to the program. So all devices do
the same things in the same order and meet at the same collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_gpp.spmd.gradient_buckets import bytes_in_bucket
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.placement import Placement
from lightning_gpp.spmd.program import (
    Computation,
    Instruction,
    ReceiveInput,
    ReturnOutput,
    SpmdProgram,
)
from lightning_gpp.spmd.run.collectives import Shape
from lightning_gpp.spmd.run.emulated import EmulatedProgram
from lightning_gpp.spmd.run.gradient_sums import GradientSums, give_gradients
from lightning_gpp.spmd.run.moves import Mover

Key = tuple[str, Placement]
"""A value in one of its placements."""


class _Cut(torch.autograd.Function):
    """A tensor whose gradient goes no further; unlike a leaf, autograd keeps nothing of it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def cut(tensor: Tensor) -> Tensor:
    """The same tensor, at which a local backward ends."""
    anchor = torch.zeros((), device=tensor.device, requires_grad=True)
    found: Tensor = _Cut.apply(anchor, tensor)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True, slots=True)
class LocalGraph:
    """Autograd's graph of one operator on this device; None where it has nothing to do.

    Attributes:
        inputs: where its backward ends.
        outputs: where it begins.
    """

    inputs: tuple[GradientEdge | None, ...]
    outputs: tuple[GradientEdge | None, ...]

    @classmethod
    def of(cls, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> LocalGraph:
        """The graph of an operator that has just run on tensors that were :func:`cut`."""
        return cls(_edges(inputs), _edges(outputs))

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> list[Tensor | None]:
        """The gradients of the inputs."""
        reached = [
            (edge, gradient)
            for edge, gradient in zip(self.outputs, gradients, strict=True)
            if edge is not None and gradient is not None
        ]
        places = [place for place, edge in enumerate(self.inputs) if edge is not None]
        found: list[Tensor | None] = [None] * len(self.inputs)
        if not reached or not places:
            return found
        made = torch.autograd.grad(
            [edge for edge, _ in reached],
            [self.inputs[place] for place in places],  # type: ignore[arg-type]
            [gradient for _, gradient in reached],
            retain_graph=retain,
            allow_unused=True,
        )
        for place, gradient in zip(places, made, strict=True):
            found[place] = gradient
        return found


def _edges(tensors: Sequence[Tensor]) -> tuple[GradientEdge | None, ...]:
    return tuple(get_gradient_edge(t) if t.requires_grad else None for t in tensors)


@dataclass(slots=True)
class ProgramRun:
    """A forward that backwards may follow.

    Attributes:
        graph: the model.
        program: what all devices do.
        mover: moves values and gradients.
        sums: of gradients of parameters.
        stored: this device's parts of parameters and buffers.
        inputs: the arguments of the forward, on rank 0.
        device: where its tensors are.
        pace: of this device, if it has one.
        results: of the forward by name: on rank 0; elsewhere empty tensors.
        local: number of an instruction -> autograd's graph of its operator.
    """

    graph: SpmdGraph
    program: SpmdProgram
    mover: Mover
    sums: GradientSums
    stored: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor] | None
    device: torch.device
    pace: EmulatedProgram | None = None
    results: dict[str, Tensor] = field(default_factory=dict)
    local: dict[int, LocalGraph] = field(default_factory=dict)
    _gradients: dict[Key, Tensor] = field(default_factory=dict)

    @property
    def roots(self) -> list[Tensor]:
        """The results in the order of the graph."""
        return [self.results[name] for name in self.graph.outputs]

    def backward(
        self, reached: Sequence[str], gradients: Mapping[str, Tensor], *, retain: bool = False
    ) -> None:
        """Goes backward; parameters, and arguments on rank 0, have their gradients after it.

        Args:
            reached: results that the loss depends on, the same on all devices.
            gradients: theirs, on rank 0.
            retain: whether another backward may follow.
        """
        self.sums.forget()
        self._gradients = {}
        for number in reversed(range(len(self.program.instructions))):
            instruction = self.program.instructions[number]
            is_reached = self._step(number, instruction, reached, gradients, retain)
            if is_reached and self.pace is not None:
                self.pace.passed(number, is_backward=True)
        given = [gradients[name] for name in reached if name in gradients]
        self._give(given, retain=retain)
        self.sums.finish()
        if self.pace is not None:
            self.pace.end_half(is_backward=True)

    def _give(self, given: Iterable[Tensor], *, retain: bool) -> None:
        """Parameters that are not summed later get the gradients that have come to them.

        Args:
            given: gradients of results, which the user has as well.
            retain: whether operators keep what their gradients may be a part of.
        """
        known = {gradient.untyped_storage().data_ptr() for gradient in given}
        trained, own = [], []
        for name, part in self.stored.items():
            gradient = self._gradients.pop((name, self.program.stored(name)), None)
            if gradient is not None and part.requires_grad:
                memory = gradient.untyped_storage()
                is_part = memory.nbytes() > gradient.nbytes
                is_shared = retain or is_part or memory.data_ptr() in known
                trained.append(part)
                own.append(gradient.clone() if is_shared else gradient)
                known.add(memory.data_ptr())
        gradient = None  # the last one is not to be had twice, either
        if trained:
            own.reverse()
            give_gradients(trained, (own.pop() for _ in trained))

    def _step(
        self,
        number: int,
        instruction: Instruction,
        reached: Sequence[str],
        gradients: Mapping[str, Tensor],
        retain: bool,
    ) -> bool:
        """One instruction backwards; whether any gradient has come to it."""
        if isinstance(instruction, Computation):
            return self._compute(number, instruction, retain)
        value = self.graph.value_of[instruction.value]
        if isinstance(instruction, ReturnOutput):
            if value.name not in reached:
                return False
            dtype = getattr(torch, value.spec.dtype)
            given = gradients.get(value.name)
            found = self.mover.give_back(given, value.shape, dtype, self.device, instruction)
            self._add((value.name, instruction.placement), found)
            return True
        if isinstance(instruction, ReceiveInput):
            gradient = self._gradients.pop((value.name, instruction.placement), None)
            if gradient is None:
                return False
            whole = self.mover.receive_back(gradient, value.shape, instruction)
            if whole is not None and self.inputs is not None:
                torch.autograd.backward(self.inputs[value.name], whole)
            return True
        gradient = self._gradients.pop((value.name, instruction.target), None)
        if gradient is None:
            return False
        if bytes_in_bucket(self.program, instruction, self.graph):
            if self.stored[value.name].requires_grad:
                self.sums.add(self.stored[value.name], gradient)
        else:
            found = self.mover.convert_back(gradient, value.shape, instruction)
            self._add((value.name, instruction.source), found)
        return True

    def _compute(self, number: int, computation: Computation, retain: bool) -> bool:
        operator = self.graph.operator_of[computation.operator]
        outputs = zip(operator.outputs, computation.outputs, strict=True)
        gradients = [self._gradients.pop(key, None) for key in outputs]
        if all(gradient is None for gradient in gradients):
            return False
        local = self.local[number] if retain else self.local.pop(number)
        found = local.backward(gradients, retain=retain)
        for name, placement, gradient in zip(
            operator.inputs, computation.inputs, found, strict=True
        ):
            value = self.graph.value_of[name]
            if not value.requires_grad:
                continue
            if gradient is None:  # the operator reads no numbers of it
                shape = self._shape(value.shape, placement)
                dtype = getattr(torch, value.spec.dtype)
                gradient = torch.zeros(shape, dtype=dtype, device=self.device)
            self._add((name, placement), gradient)
        return True

    def _shape(self, whole: Shape, placement: Placement) -> Shape:
        return self.mover.shards.shape(whole, placement, self.mover.collectives.rank)

    def _add(self, key: Key, gradient: Tensor) -> None:
        there = self._gradients.get(key)
        self._gradients[key] = gradient if there is None else there + gradient
