"""Runs an SPMD program on one device: instruction by instruction, each on the device's parts.

Autograd has the operators one at a time; what follows what, backwards as well, is up to the
program. So all devices do the same things in the same order and meet at the same collectives.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_gpp.common.torch_device import forked_random
from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator, SpmdValue, ValueSource
from lightning_gpp.spmd.placement import Placement
from lightning_gpp.spmd.program import (
    Computation,
    Conversion,
    ReceiveInput,
    ReturnOutput,
    SpmdProgram,
    bytes_in_bucket,
)
from lightning_gpp.spmd.run.collectives import Collectives
from lightning_gpp.spmd.run.gradient_sums import GradientSums, give_gradients
from lightning_gpp.spmd.run.local_operator import LocalGraph, cut, run_operator
from lightning_gpp.spmd.run.moves import Mover, Shards
from lightning_gpp.spmd.run.operator_calls import CPU, is_random

Key = tuple[str, Placement]
"""A value in one of its placements."""

_DRAWING = threading.Lock()
"""Devices that are threads of one process share its generator of random numbers."""


@dataclass(slots=True)
class Interpreter:
    """Runs a program on one device.

    Attributes:
        graph: the model, whose operators say how they are called.
        program: what all devices do.
        collectives: of this device with the others.
        device: where its tensors are.
        reads: of every instruction the values that it reads.
        last_use: the last instruction that reads a value.
    """

    graph: SpmdGraph
    program: SpmdProgram
    collectives: Collectives
    device: torch.device = CPU
    mover: Mover = field(init=False)
    reads: list[list[Key]] = field(default_factory=list)
    last_use: dict[Key, int] = field(init=False)

    def __post_init__(self) -> None:
        if self.program.num_devices != self.collectives.num_ranks:
            raise ValueError(
                f"the program is for {self.program.num_devices} devices, there are "
                f"{self.collectives.num_ranks} ranks"
            )
        for value in self.graph.of_source(ValueSource.BUFFER):
            if (stored := self.program.stored(value.name)).is_shard:
                raise ValueError(
                    f"the program stores the buffer {value.name!r} as {stored}; buffers are stored "
                    "whole, as operators may change them"
                )
        self.mover = Mover(self.collectives, Shards(self.program.shares), self.device)
        for each in self.program.instructions:
            match each:
                case Conversion():
                    self.reads.append([(each.value, each.source)])
                case ReturnOutput():
                    self.reads.append([(each.value, each.placement)])
                case Computation():
                    names = self.graph.operator_of[each.operator].inputs
                    self.reads.append(list(zip(names, each.inputs, strict=True)))
                case _:
                    self.reads.append([])
        self.last_use = {key: number for number, keys in enumerate(self.reads) for key in keys}

    def run(
        self, stored: Mapping[str, Tensor], inputs: Mapping[str, Tensor] | None, *, seed: int = 0
    ) -> ProgramRun:
        """The forward; where gradients are recorded, a backward may follow.

        Args:
            stored: this device's parts of parameters, buffers and constants, as stored.
            inputs: the arguments of the forward, on rank 0.
            seed: of random numbers; the same on all ranks.
        """
        run = ProgramRun(self, stored, inputs)
        run.forward(seed)
        return run


class ProgramRun:
    """A forward that backwards may follow.

    Args:
        interpreter: of this device.
        stored: this device's parts of parameters and buffers.
        inputs: the arguments of the forward, on rank 0.

    Attributes:
        results: of the forward by name: on rank 0; elsewhere empty tensors.
    """

    def __init__(
        self,
        interpreter: Interpreter,
        stored: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor] | None,
    ) -> None:
        self._of, self.graph, self._mover = interpreter, interpreter.graph, interpreter.mover
        self._program = interpreter.program
        self._stored, self._inputs = stored, inputs
        self._there: dict[Key, Tensor] = {}
        """Values in the forward, then gradients."""
        self._local: dict[int, LocalGraph] = {}
        """Number of an instruction -> autograd's graph of its operator."""
        self.results: dict[str, Tensor] = {}

    @property
    def roots(self) -> list[Tensor]:
        """The results in the order of the graph."""
        return [self.results[name] for name in self.graph.outputs]

    # Forwards --------------------------------------------------------------------------------

    def forward(self, seed: int) -> None:
        """Runs all instructions."""
        for value in self.graph.values:
            if value.source in (ValueSource.PARAMETER, ValueSource.BUFFER):
                key = value.name, self._program.stored(value.name)
                self._there[key] = self._stored[value.name].detach()
        for number, instruction in enumerate(self._program.instructions):
            if isinstance(instruction, Computation):
                self._compute(number, instruction, seed)
            else:
                self._move(instruction, self.graph.value_of[instruction.value])
            for key in self._of.reads[number]:
                if self._of.last_use[key] == number:
                    self._there.pop(key, None)
        self._there = {}

    def _move(
        self, instruction: ReceiveInput | Conversion | ReturnOutput, value: SpmdValue
    ) -> None:
        name, whole, mover = value.name, value.shape, self._mover
        match instruction:
            case ReceiveInput(placement=place):
                given = None if self._inputs is None else self._inputs[name].detach()
                what = f"argument {name}, {place}"
                self._there[name, place] = mover.from_root(given, whole, _dtype(value), place, what)
            case Conversion(source=source, target=target):
                part, what = self._there[name, source], f"{name} {source} -> {target}"
                self._there[name, target] = mover.move(part, whole, source, target, what)
            case ReturnOutput(placement=place):
                part = self._there[name, place]
                given = mover.to_root(part, whole, place, f"result {name}, {place}")
                result = part.new_zeros(0) if given is None else given.detach()
                has_gradient = value.requires_grad and torch.is_grad_enabled()
                self.results[name] = result.requires_grad_(has_gradient)

    def _compute(self, number: int, computation: Computation, seed: int) -> None:
        operator = self.graph.operator_of[computation.operator]
        tensors = [self._there[key] for key in self._of.reads[number]]
        is_recorded = operator.is_recorded and torch.is_grad_enabled()
        if is_recorded:
            for place, name in enumerate(operator.inputs):
                if self.graph.value_of[name].requires_grad:
                    tensors[place] = cut(tensors[place])
        own = 1 + self._mover.rank if any(p.is_shard for p in computation.outputs) else 0
        with self._drawing(operator, ((seed * 1_000_003 + number) * 8191 + own) % 2**63):
            made = run_operator(self.graph, computation, self._mover, tensors)
        if is_recorded:
            self._local[number] = LocalGraph.of(tensors, made)
        keys = zip(operator.outputs, computation.outputs, strict=True)
        self._there |= zip(keys, (tensor.detach() for tensor in made), strict=True)

    @contextmanager
    def _drawing(self, operator: SpmdOperator, seed: int) -> Iterator[None]:
        """Whole tensors get the same random numbers everywhere, parts ones of their own."""
        if not is_random(operator):
            yield
            return
        with _DRAWING, forked_random(self._of.device):
            torch.manual_seed(seed)
            yield

    # Backwards -------------------------------------------------------------------------------

    def backward(
        self, reached: Sequence[str], gradients: Mapping[str, Tensor], *, retain: bool = False
    ) -> None:
        """Goes backward; parameters, and arguments on rank 0, have their gradients after it.

        Args:
            reached: results that the loss depends on, the same on all devices.
            gradients: theirs, on rank 0.
            retain: whether another backward may follow.
        """
        self._there = {}
        self._sums = GradientSums(self._of.collectives)
        for number in reversed(range(len(self._program.instructions))):
            instruction = self._program.instructions[number]
            if isinstance(instruction, Computation):
                self._compute_back(number, instruction, retain)
            else:
                value = self.graph.value_of[instruction.value]
                self._move_back(instruction, value, reached, gradients)
        self._give([gradients[name] for name in reached if name in gradients], retain=retain)
        self._sums.finish()

    def _move_back(
        self,
        instruction: ReceiveInput | Conversion | ReturnOutput,
        value: SpmdValue,
        reached: Sequence[str],
        gradients: Mapping[str, Tensor],
    ) -> None:
        """Moves the gradient that has come to an instruction, if one has."""
        name, whole, mover = value.name, value.shape, self._mover
        if isinstance(instruction, ReturnOutput):
            dual, what = instruction.placement.dual, f"gradient of result {name}"
            if name in reached:
                found = mover.from_root(gradients.get(name), whole, _dtype(value), dual, what)
                self._add((name, instruction.placement), found)
            return
        if isinstance(instruction, ReceiveInput):
            place = instruction.placement
            if (gradient := self._there.pop((name, place), None)) is None:
                return
            given = mover.to_root(gradient, whole, place.dual, f"gradient of argument {name}")
            if given is not None and self._inputs is not None:
                torch.autograd.backward(self._inputs[name], given)
            return
        source, target = instruction.source, instruction.target
        if (gradient := self._there.pop((name, target), None)) is None:
            return
        if bytes_in_bucket(self._program, instruction, self.graph):
            if self._stored[name].requires_grad:
                self._sums.add(self._stored[name], gradient)
        else:
            what = f"gradient of {name} {source} -> {target}"
            found = mover.move(gradient, whole, target.dual, source.dual, what)
            self._add((name, source), found)

    def _compute_back(self, number: int, computation: Computation, retain: bool) -> None:
        operator = self.graph.operator_of[computation.operator]
        outputs = zip(operator.outputs, computation.outputs, strict=True)
        gradients = [self._there.pop(key, None) for key in outputs]
        if all(gradient is None for gradient in gradients):
            return
        local = self._local[number] if retain else self._local.pop(number)
        found = local.backward(gradients, retain=retain)
        for key, gradient in zip(self._of.reads[number], found, strict=True):
            value = self.graph.value_of[key[0]]
            if value.requires_grad:
                if gradient is None:  # the operator reads no numbers of it
                    shape = self._mover.shards.shape(value.shape, key[1], self._mover.rank)
                    gradient = torch.zeros(shape, dtype=_dtype(value), device=self._of.device)
                self._add(key, gradient)

    def _add(self, key: Key, gradient: Tensor) -> None:
        there = self._there.get(key)
        self._there[key] = gradient if there is None else there + gradient

    def _give(self, given: Iterable[Tensor], *, retain: bool) -> None:
        """Parameters that are not summed later get the gradients that have come to them.

        Args:
            given: gradients of results, which the user has as well.
            retain: whether operators keep what their gradients may be a part of.
        """
        known = {gradient.untyped_storage().data_ptr() for gradient in given}
        trained, own = [], []
        for name, part in self._stored.items():
            gradient = self._there.pop((name, self._program.stored(name)), None)
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


def _dtype(value: SpmdValue) -> torch.dtype:
    found: torch.dtype = getattr(torch, value.spec.dtype)
    return found
