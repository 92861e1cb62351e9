"""One operator on this device: on parts of tensors, forwards and backwards by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.placement import R_SAME, Placement
from lightning_gpp.spmd.program import Computation, Option
from lightning_gpp.spmd.run.collectives import Shape
from lightning_gpp.spmd.run.moves import Mover
from lightning_gpp.spmd.run.operator_calls import OperatorCall

Run = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


def run_operator(
    call: OperatorCall,
    graph: SpmdGraph,
    computation: Computation,
    mover: Mover,
    tensors: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """This device's parts of the outputs of an operator.

    Args:
        call: of the operator.
        graph: that it is of.
        computation: how it is run.
        mover: of this device.
        tensors: this device's parts of its inputs.

    Raises:
        RuntimeError: what it makes is of another size than its placement says, which would go
            wrong silently later.
    """
    operator, rank, shards = graph.operator_of[computation.operator], mover.rank, mover.shards
    wholes = [graph.value_of[name].shape for name in operator.inputs]
    results = [graph.value_of[name].shape for name in operator.outputs]
    expected = [shards.shape(w, p, rank) for w, p in zip(results, computation.outputs)]
    arguments = local_arguments(operator.kind, call.arguments, computation.outputs, expected)

    def run(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return call.run(given, arguments, mover.device)

    match computation.option:
        case Option.PLAIN:
            made = run(tensors)
        case Option.MEAN:  # of a device's elements, by their part of all
            made = (run(tensors)[0] * (tensors[0].numel() / prod(wholes[0])),)
        case Option.VOCABULARY:
            table = computation.inputs[0]
            first = shards.start(table, rank) * table.block(wholes[0][0])
            made = (_look_up_rows(tensors[0], tensors[1], first, arguments),)
        case Option.SUFFICIENT_FACTORS:
            ends = (wholes[0], computation.inputs[0]), (results[0], computation.outputs[0])
            made = (_sufficient_factors(mover, computation, run, tensors, ends),)
    for shape, tensor in zip(expected, made, strict=True):
        if tuple(tensor.shape) != shape:
            raise RuntimeError(
                f"operator {operator.name!r} ({operator.kind}, rule {computation.note!r}) made "
                f"{tuple(tensor.shape)} on rank {rank}, but {shape} is this rank's part as "
                f"{', '.join(map(str, computation.outputs))}"
            )
    return made


def local_arguments(
    kind: str,
    arguments: Mapping[str, Any],
    placements: Sequence[Placement],
    shapes: Sequence[Shape],
) -> dict[str, Any]:
    """Arguments that name sizes of whole tensors, as sizes of a device's part.

    Args:
        kind: of the operator.
        arguments: for the whole tensors.
        placements: of its outputs.
        shapes: of the device's parts of its outputs.

    >>> from lightning_gpp.spmd.placement import shard
    >>> local_arguments("view", {"size": [4, 2, -1]}, [shard(0, 4)], [(3, 2, 5)])
    {'size': [3, 2, 5]}
    """
    local = dict(arguments)
    if not placements or not placements[0].is_shard:
        return local
    shape, dim = shapes[0], placements[0].dim
    assert dim is not None
    for name in ("size", "shape"):
        if isinstance(local.get(name), tuple | list) and len(local[name]) == len(shape):
            local[name] = list(shape)
    if kind == "unflatten":
        count = len(local["sizes"])
        start = local["dim"] % (len(shape) - count + 1)
        local["sizes"] = list(shape[start : start + count])
    if kind in ("split", "unsafe_split") and local.get("dim", 0) % len(shape) == dim:
        local["split_size"] = shape[dim]
    if kind == "split_with_sizes" and local.get("dim", 0) % len(shape) == dim:
        local["split_sizes"] = [each[dim] for each in shapes]
    return local


def _look_up_rows(weight: Tensor, indices: Tensor, first: int, arguments: dict[str, Any]) -> Tensor:
    """A device's summand of look-ups in a table of which it has rows from ``first`` on.

    Rows of other devices count as zeros.
    """
    num_rows = weight.shape[0]
    is_here = (indices >= first) & (indices < first + num_rows)
    local = torch.where(is_here, indices - first, torch.zeros_like(indices))
    padding = int(arguments.get("padding_idx", -1)) - first
    rows = F.embedding(local, weight, padding if 0 <= padding < num_rows else None)
    # A row that stands in for one of another device gets a gradient of zeros.
    return torch.where(is_here.unsqueeze(-1), rows, torch.zeros((), dtype=rows.dtype))


class _SufficientFactors(torch.autograd.Function):
    """A linear layer whose weight's gradient comes from gathered factors, not from a sum."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Run,
        gathers: Sequence[Callable[[Tensor], Tensor]],
        part: Tensor,
        weight: Tensor,
        *bias: Tensor,
    ) -> Tensor:
        ctx.gathers, ctx.num_bias = gathers, len(bias)
        ctx.save_for_backward(part, weight)
        return run([part, weight, *bias])[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        (gradient,) = gradients
        of_part = gradient.matmul(weight) if ctx.needs_input_grad[2] else None
        gather_input, gather_gradient = ctx.gathers
        whole_gradient = gather_gradient(gradient).flatten(0, -2)
        of_weight = None
        if ctx.needs_input_grad[3]:
            of_weight = whole_gradient.t().mm(gather_input(part).flatten(0, -2))
        return None, None, of_part, of_weight, *[whole_gradient.sum(0)] * ctx.num_bias


def _sufficient_factors(
    mover: Mover,
    computation: Computation,
    run: Run,
    tensors: Sequence[Tensor],
    ends: Sequence[tuple[Shape, Placement]],
) -> Tensor:
    """The result of a linear layer, with gathered factors backwards.

    Args:
        mover: gathers them.
        computation: the instruction.
        run: the operator.
        tensors: this device's parts of its input, weight, and bias if it has one.
        ends: sizes of its whole input and result, and how they lie.
    """

    def gather(whole: Shape, source: Placement) -> Callable[[Tensor], Tensor]:
        purpose, method = f"factors of {computation.operator}", computation.method
        return lambda tensor: mover.move(tensor, whole, source, R_SAME, method, purpose)

    gathers = [gather(*end) for end in ends]
    found: Tensor = _SufficientFactors.apply(run, gathers, *tensors)  # type: ignore[no-untyped-call]
    return found


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


def _edges(tensors: Sequence[Tensor]) -> tuple[GradientEdge | None, ...]:
    return tuple(get_gradient_edge(t) if t.requires_grad else None for t in tensors)
