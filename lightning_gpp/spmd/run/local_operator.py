"""One operator on this device: on parts of tensors, forwards and backwards by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.program import Computation, Option
from lightning_gpp.spmd.run.collectives import Shape
from lightning_gpp.spmd.run.moves import Mover
from lightning_gpp.spmd.run.operator_calls import call


def run_operator(
    graph: SpmdGraph, computation: Computation, mover: Mover, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """This device's parts of the outputs of an operator.

    Args:
        graph: that it is of.
        computation: how it is run.
        mover: of this device.
        tensors: this device's parts of its inputs.

    Raises:
        RuntimeError: what it makes is of another size than its placement says, which would go
            wrong silently later.
    """
    operator, rank, shards = graph.operator_of[computation.operator], mover.rank, mover.shards
    whole = graph.value_of[operator.inputs[0]].shape if operator.inputs else ()
    results = [graph.value_of[name].shape for name in operator.outputs]
    expected = [shards.shape(w, p, rank) for w, p in zip(results, computation.outputs)]
    arguments = operator.attributes
    if computation.outputs and computation.outputs[0].is_shard:
        arguments = local_arguments(operator.kind, arguments, expected[0])
    if computation.option is Option.VOCABULARY:
        _, first, _ = shards.extent(whole, computation.inputs[0], rank)
        made: tuple[Tensor, ...] = (_look_up_rows(tensors[0], tensors[1], first),)
    else:
        made = call(operator, tensors, arguments, mover.device)
    if computation.option is Option.MEAN:  # of a device's elements, by their part of all
        made = (made[0] * (tensors[0].numel() / prod(whole)),)
    for shape, tensor in zip(expected, made, strict=True):
        if tuple(tensor.shape) != shape:
            raise RuntimeError(
                f"operator {operator.name!r} ({operator.kind}) made "
                f"{tuple(tensor.shape)} on rank {rank}, but {shape} is this rank's part as "
                f"{', '.join(map(str, computation.outputs))}"
            )
    return made


def local_arguments(kind: str, arguments: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """Arguments that name sizes of whole tensors, as sizes of a device's part.

    Args:
        kind: of the operator.
        arguments: for the whole tensors.
        shape: of the device's part of its output.

    >>> local_arguments("view", {"size": [4, 2, -1]}, (3, 2, 5))
    {'size': [3, 2, 5]}
    """
    local = dict(arguments)
    for name in ("size", "shape"):
        if isinstance(local.get(name), list) and len(local[name]) == len(shape):
            local[name] = list(shape)
    if kind == "unflatten":
        count = len(local["sizes"])
        start = local["dim"] % (len(shape) - count + 1)
        local["sizes"] = list(shape[start : start + count])
    return local


def _look_up_rows(weight: Tensor, indices: Tensor, first: int) -> Tensor:
    """A device's summand of look-ups in a table of which it has rows from ``first`` on.

    Rows of other devices count as zeros.
    """
    is_here = (indices >= first) & (indices < first + weight.shape[0])
    rows = F.embedding(torch.where(is_here, indices - first, 0), weight)
    # A row that stands in for one of another device gets a gradient of zeros.
    return torch.where(is_here.unsqueeze(-1), rows, torch.zeros((), dtype=rows.dtype))


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

    inputs: list[GradientEdge | None]
    outputs: list[GradientEdge | None]

    @classmethod
    def of(cls, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> LocalGraph:
        """The graph of an operator that has just run on tensors that were :func:`cut`."""
        ends, starts = (
            [get_gradient_edge(t) if t.requires_grad else None for t in tensors]
            for tensors in (inputs, outputs)
        )
        return cls(ends, starts)

    def backward(self, gradients: Sequence[Tensor | None], *, retain: bool) -> list[Tensor | None]:
        """The gradients of the inputs."""
        starts = [
            (edge, gradient)
            for edge, gradient in zip(self.outputs, gradients, strict=True)
            if edge is not None and gradient is not None
        ]
        ends = {place: edge for place, edge in enumerate(self.inputs) if edge is not None}
        made: Sequence[Tensor | None] = ()
        if starts and ends:
            edges, given = zip(*starts, strict=True)
            options = {"retain_graph": retain, "allow_unused": True}
            made = torch.autograd.grad(edges, [*ends.values()], given, **options)
        by_place = dict(zip(ends, made))
        return [by_place.get(place) for place in range(len(self.inputs))]
