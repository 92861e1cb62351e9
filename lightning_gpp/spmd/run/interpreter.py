"""Runs an SPMD program on one device, instruction by instruction.

The whole forward is one graph of autograd, in which moves between devices are nodes whose backward
moves the gradient back. All devices record the same nodes, and autograd runs what is ready in the
reverse order in which it was recorded, so that they meet at the same collectives backwards, too.

A gradient of a whole parameter, of which every device has a summand, is summed with others: a
message costs its latency whatever its size, and a model has hundreds of parameters. A bucket's sum
begins when it is full, beside the rest of the backward, as in
``torch.nn.parallel.DistributedDataParallel`` (Li et al., VLDB 2020).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.cluster import BUCKET_BYTES
from lightning_gpp.common.torch_device import forked_random
from lightning_gpp.spmd.operator_graph import SpmdGraph, ValueSource
from lightning_gpp.spmd.placement import Placement
from lightning_gpp.spmd.program import (
    Computation,
    Instruction,
    Move,
    SpmdProgram,
    bytes_in_bucket,
)
from lightning_gpp.spmd.run.moves import Collectives, Mover, Shards
from lightning_gpp.spmd.run.operator_calls import CPU, is_random, run_operator

Key = tuple[str, Placement]
"""A value in one of its placements."""

_DRAWING = threading.Lock()
"""Devices that are threads of one process share its generator of random numbers."""


class Interpreter:
    """Runs a program on one device.

    Args:
        graph: the model, whose operators say how they are called.
        program: what all devices do.
        group: this device and the others.
        device: where its tensors are.

    Raises:
        ValueError: the program is for another number of devices, or stores a buffer in parts.
    """

    def __init__(
        self,
        graph: SpmdGraph,
        program: SpmdProgram,
        group: Collectives,
        device: torch.device = CPU,
    ) -> None:
        if program.num_devices != group.num_ranks:
            raise ValueError(
                f"the program is for {program.num_devices} devices, there are "
                f"{group.num_ranks} ranks"
            )
        for value in graph.of_source(ValueSource.BUFFER):
            if (stored := program.stored(value.name)).is_shard:
                raise ValueError(
                    f"the program stores the buffer {value.name!r} as {stored}; buffers are stored "
                    "whole, as operators may change them"
                )
        self.graph, self.program = graph, program
        self._mover = Mover(group, Shards(program.shares), device)
        self._reads = [self._read_by(instruction) for instruction in program.instructions]
        self._last_use = {key: number for number, keys in enumerate(self._reads) for key in keys}

    def _read_by(self, instruction: Instruction) -> list[Key]:
        if isinstance(instruction, Computation):
            names = self.graph.operator_of[instruction.operator].inputs
            return list(zip(names, instruction.inputs, strict=True))
        return [(instruction.value, instruction.source)] if instruction.source else []

    def run(
        self, stored: Mapping[str, Tensor], inputs: Mapping[str, Tensor] | None, *, seed: int = 0
    ) -> ProgramRun:
        """The forward; where gradients are recorded, a backward may follow.

        Args:
            stored: this device's parts of parameters, buffers and constants, as stored.
            inputs: the arguments of the forward, on rank 0.
            seed: of random numbers; the same on all ranks.
        """
        sums, results = _GradientSums(self._mover.group), dict[str, Tensor]()
        there = {(name, self.program.stored(name)): part for name, part in stored.items()}
        for number, each in enumerate(self.program.instructions):
            read = [there[key] for key in self._reads[number]]
            if isinstance(each, Computation):
                with self._drawing(number, each, seed):
                    made = run_operator(self.graph, each, self._mover, read)
                names = self.graph.operator_of[each.operator].outputs
                there |= zip(zip(names, each.outputs), made, strict=True)
            else:
                part = read[0] if each.source else self._given(each.value, inputs)
                is_later = bytes_in_bucket(self.program, each, self.graph)
                moved = self._moved(each, part, partial(sums.add, part) if is_later else None)
                if each.target is None:
                    results[each.value] = moved
                else:
                    there[each.value, each.target] = moved
            for key in self._reads[number]:
                if self._last_use[key] == number:
                    there.pop(key, None)
        return ProgramRun(stored, results, sums)

    @contextmanager
    def _drawing(self, number: int, computation: Computation, seed: int) -> Iterator[None]:
        """Whole tensors get the same random numbers everywhere, parts ones of their own."""
        if not is_random(self.graph.operator_of[computation.operator]):
            yield
            return
        own = 1 + self._mover.rank if any(p.is_shard for p in computation.outputs) else 0
        with _DRAWING, forked_random(self._mover.device):
            torch.manual_seed(((seed * 1_000_003 + number) * 8191 + own) % 2**63)
            yield

    def _given(self, name: str, inputs: Mapping[str, Tensor] | None) -> Tensor:
        """An argument on rank 0; elsewhere an empty tensor has its place in autograd's graph."""
        value, device = self.graph.value_of[name], self._mover.device
        if inputs is None:
            dtype = getattr(torch, value.spec.dtype)
            return torch.empty(0, dtype=dtype, device=device, requires_grad=value.requires_grad)
        given = inputs[name].to(device)
        return given if value.requires_grad else given.detach()

    def _moved(self, each: Move, part: Tensor, add: Callable[[Tensor], None] | None) -> Tensor:
        """A value in another placement; its gradient moves back, or is added to sums."""
        mover, whole = self._mover, self.graph.value_of[each.value].shape
        source, target, what = each.source, each.target, f"{each.source} -> {each.target}"
        ends = target and target.dual, source and source.dual

        def there(tensor: Tensor) -> Tensor:
            return mover.move(tensor, whole, source, target, f"{each.value}, {what}")

        def back(gradient: Tensor) -> Tensor:
            return mover.move(gradient, whole, *ends, f"gradient of {each.value}, {what}")

        moved: Tensor = _MoveNode.apply(part, there, add or back)  # type: ignore[no-untyped-call]
        return moved


class _MoveNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Callable[[Tensor], Tensor], back: Any) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.back(*gradients), None, None


@dataclass(slots=True)
class _GradientSums:
    """Summands of whole parameters' gradients, on their way to be summed.

    Attributes:
        group: this device and the others.
    """

    group: Collectives
    _open: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _size_bytes: int = 0
    _begun: list[tuple[list[Tensor], Callable[[], Tensor]]] = field(default_factory=list)

    def add(self, parameter: Tensor, summand: Tensor) -> None:
        """A summand of a parameter's gradient, which the parameter gets in :meth:`finish`."""
        if self._open and self._open[0][1].dtype != summand.dtype:
            self._begin()
        self._open.append((parameter, summand))
        self._size_bytes += summand.nbytes
        if self._size_bytes >= BUCKET_BYTES:
            self._begin()

    def _begin(self) -> None:
        bucket, self._open, self._size_bytes = self._open, [], 0
        flat = torch.cat([summand.reshape(-1) for _, summand in bucket])
        purpose = f"summing the gradients of {len(bucket)} parameters"
        ended = self.group.begin_all_reduce(flat, purpose=purpose)
        self._begun.append(([parameter for parameter, _ in bucket], ended))

    def finish(self) -> None:
        """Waits for all sums; parameters get copies of them, of memory of their own."""
        if self._open:
            self._begin()
        begun, self._begun = self._begun, []
        for parameters, ended in begun:
            parts = torch.split(ended(), [parameter.numel() for parameter in parameters])
            gradients = [part.view_as(own) for part, own in zip(parts, parameters, strict=True)]
            torch.autograd.backward(parameters, gradients)


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """A forward, and its backwards.

    Attributes:
        stored: this device's parts of parameters and buffers.
        results: of the forward by name: on rank 0; elsewhere empty tensors.
        sums: of gradients.
    """

    stored: Mapping[str, Tensor]
    results: dict[str, Tensor]
    sums: _GradientSums

    def backward(
        self, reached: Sequence[str], gradients: Mapping[str, Tensor], *, retain: bool = False
    ) -> None:
        """Goes backward; parameters, and arguments on rank 0, have their gradients after it.

        Args:
            reached: results that the loss depends on, the same on all devices.
            gradients: theirs, on rank 0.
            retain: whether another backward may follow.
        """
        results = [self.results[name] for name in reached]
        if not results:
            return
        given = [gradients.get(n, torch.empty_like(r)) for n, r in zip(reached, results)]
        torch.autograd.backward(results, given, retain_graph=retain)
        self.sums.finish()
        # Views may have left several parameters one memory, or a part of a larger one.
        known = {gradient.untyped_storage().data_ptr() for gradient in given}
        for part in self.stored.values():
            if part.grad is not None:
                memory = part.grad.untyped_storage()
                if memory.data_ptr() in known or memory.nbytes() > part.grad.nbytes:
                    part.grad = part.grad.clone()
                known.add(memory.data_ptr())
