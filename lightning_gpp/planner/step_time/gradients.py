"""When a stage's gradients are ready, and how long their all-reduces go on afterwards.

The gradients of an operator are final when the last backward of its stage has passed it. They are
summed in buckets as they come, beside the rest of that backward (PyTorch's DDP, Li et al., arXiv
2006.15704; wait-free back-propagation), as the runtime does it
(:meth:`.Program.last_backward`) and the simulator shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from lightning_gpp.cluster import BUCKET_BYTES
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan.plan import Stage

SumSeconds = Callable[[float], float]
"""Seconds of the sum of so many bytes."""


class GradientPiece(NamedTuple):
    """Gradients that are all-reduced together.

    Attributes:
        size_bytes: of the gradients.
        ready_s: seconds after the backward's start at which the last of them is final.
    """

    size_bytes: float
    ready_s: float

    def with_next(self, later: GradientPiece) -> GradientPiece:
        """Together with a piece that is ready later."""
        return GradientPiece(self.size_bytes + later.size_bytes, later.ready_s)


@dataclass(frozen=True)
class Gradients:
    """The gradients of a backward.

    Attributes:
        pieces: in the order in which they come.
        backward_s: seconds of the whole backward, also of layers without gradients.
    """

    pieces: Sequence[GradientPiece]
    backward_s: float

    def part(self, piece: GradientPiece) -> float:
        """The part of the backward after which a piece is final."""
        return min(1.0, piece.ready_s / self.backward_s) if self.backward_s else 1.0


def last_end_s(pieces: Iterable[GradientPiece], sum_s: SumSeconds) -> float:
    r"""When the last sum ends, in seconds after the backward's start.

    .. math:: \tau_c^{(l)} = \max(\tau_c^{(l+1)} + t_c^{(l+1)}, \tau_b^{(l)} + t_b^{(l)})

    Sums follow one another in the order in which gradients come. Source: arXiv 1805.03812.
    """
    end_s = 0.0
    for piece in pieces:
        end_s = max(end_s, piece.ready_s) + sum_s(piece.size_bytes)
    return end_s


def in_buckets(gradients: Gradients) -> list[GradientPiece]:
    """Buckets that are closed when they have enough bytes, as in PyTorch's DDP and our runtime.

    Unlike merging by MG-WFBP's rule, this may be slower than a sum per layer.
    """
    found: list[GradientPiece] = []
    for piece in gradients.pieces:
        if found and found[-1].size_bytes < BUCKET_BYTES:
            found[-1] = found[-1].with_next(piece)
        else:
            found.append(piece)
    return found


def stage_gradients(
    request: PlanRequest, stage: Stage, unit_size: float, parameters: Collection[str]
) -> Gradients:
    """The gradients of a stage's backward, on its slowest replica.

    A stage that recomputes runs its forward first. A parameter that several operators read belongs
    to the first of them, whose backward is last.

    Args:
        request: the model and its costs.
        stage: the stage.
        unit_size: samples of a smallest micro-batch.
        parameters: those whose gradients count, in the order of the operators.
    """
    graph, tables = request.graph, request.tables
    devices = request.cluster.devices
    replicas = sorted(
        {(devices[d].kind, n) for d, n in zip(stage.devices, stage.replica_multiples)}
    )
    computes = [tables.compute(stage.operators, n * unit_size, kind) for kind, n in replicas]
    backwards_s = [c.backward_s + (c.forward_s if stage.recompute else 0.0) for c in computes]
    slowest = max(range(len(replicas)), key=backwards_s.__getitem__)
    kind, units = replicas[slowest]
    costs = tables.profile(units * unit_size, kind).operators
    ready_s = backwards_s[slowest] - computes[slowest].backward_s
    found = [graph.parameter[name] for name in parameters]
    left = {one.name: one.size_bytes for one in found if one.requires_grad and one.size_bytes}
    rows = []
    for name in tables.in_order(stage.operators):
        read = graph.operator[name].parameters
        rows.append((name, [left.pop(one) for one in read if one in left]))
    pieces = []
    for name, sizes in reversed(rows):
        ready_s += costs[name].backward_s
        pieces += [GradientPiece(size_bytes, ready_s) for size_bytes in reversed(sizes)]
    return Gradients(pieces, ready_s)


class StageSums(NamedTuple):
    """The all-reduces of a stage's gradients over its replicas.

    Attributes:
        buckets: of every sum, the part of the last backward after which its gradients are final,
            and its seconds, in the order in which they begin.
        after_s: seconds that they go on after the last backward, where they follow one another.
    """

    buckets: tuple[tuple[float, float], ...]
    after_s: float


NO_SUMS = StageSums((), 0.0)
"""Of a stage without replicas."""


def stage_sums(
    request: PlanRequest, stage: Stage, unit_size: float, parameters: tuple[str, ...]
) -> StageSums:
    """The sums of the gradients of a stage, in buckets.

    Args:
        request: the model, its costs and the links.
        stage: the stage.
        unit_size: samples of a smallest micro-batch.
        parameters: those that are summed over its replicas, in the order of the operators.
    """
    known = request.tables.stage_sums
    sizes = tuple(unit_size * units for units in stage.replica_multiples)
    key = stage.operators, stage.devices, sizes, stage.recompute, parameters
    found = known.get(key)
    if found is None:
        gradients = stage_gradients(request, stage, unit_size, parameters)
        sum_s = partial(request.tables.reduce_s, tuple(sorted(stage.devices)))
        pieces = in_buckets(gradients)
        after_s = max(0.0, last_end_s(pieces, sum_s) - gradients.backward_s)
        buckets = tuple((gradients.part(piece), sum_s(piece.size_bytes)) for piece in pieces)
        found = known[key] = StageSums(buckets, after_s)
    return found
