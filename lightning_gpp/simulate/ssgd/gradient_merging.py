"""Which gradients of data-parallel devices are summed together, and when a sum may begin.

An all-reduce of ``n`` bytes takes about ``a + b n`` seconds, so that a sum less saves ``a``; but a
sum of many layers waits for the last of them.

Sources: the DAG model of S-SGD (Shi et al., arXiv 1805.03812) sums every layer by itself, at the
end (naive) or as soon as its backward is done (wait-free back-propagation); MG-WFBP (Shi et al.,
INFOCOM 2019) merges layers while that makes no sum end later. Its rule is greedy: it is never worse
than a sum per layer or than one sum of all, but there can be better groups; ``optimal`` finds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lightning_gpp.planner.step_time.gradients import GradientPiece, Gradients, Rule, SumSeconds


def each_layer(gradients: Gradients, sum_s: SumSeconds) -> list[GradientPiece]:
    """Wait-free back-propagation: every layer by itself."""
    return list(gradients.pieces)


def at_end(gradients: Gradients, sum_s: SumSeconds) -> list[GradientPiece]:
    """Every layer by itself, but not before the whole backward is done."""
    return [GradientPiece(piece.size_bytes, gradients.backward_s) for piece in gradients.pieces]


def one_at_end(gradients: Gradients, sum_s: SumSeconds) -> list[GradientPiece]:
    """All layers in one sum, after the backward."""
    total = sum(piece.size_bytes for piece in gradients.pieces)
    return [GradientPiece(total, gradients.backward_s)] if gradients.pieces else []


def merged(gradients: Gradients, sum_s: SumSeconds) -> list[GradientPiece]:
    """MG-WFBP: a layer joins the sum before it where that makes no sum end later.

    It does if its gradients come before that sum would end, and either that sum has not begun by
    then, or has waited for less than what a sum less saves (``a`` of ``a + b n``).
    """
    found: list[GradientPiece] = []
    end_s = 0.0
    for piece in gradients.pieces:
        if found:
            last = found[-1]
            start_s = max(end_s, last.ready_s)
            own_s, other_s = sum_s(last.size_bytes), sum_s(piece.size_bytes)
            saved_s = own_s + other_s - sum_s(last.size_bytes + piece.size_bytes)
            if piece.ready_s < start_s + own_s and piece.ready_s - start_s < saved_s:
                found[-1] = last.with_next(piece)
                continue
            end_s = start_s + own_s
        found.append(piece)
    return found


def optimal(gradients: Gradients, sum_s: SumSeconds) -> list[GradientPiece]:
    """The groups of layers with which the last sum ends first, by dynamic programming.

    Quadratic in the layers: ``end[i] = min over j of max(end[j], ready[i]) + sum of j … i``.
    """
    pieces = gradients.pieces
    before = [0.0]
    for piece in pieces:
        before.append(before[-1] + piece.size_bytes)
    end_s, first = [0.0], [0]
    for stop, piece in enumerate(pieces, start=1):
        ends = (
            max(end_s[start], piece.ready_s) + sum_s(before[stop] - before[start])
            for start in range(stop)
        )
        best_s, start = min((end, -start) for start, end in enumerate(ends))
        end_s.append(best_s)
        first.append(-start)
    found: list[GradientPiece] = []
    stop = len(pieces)
    while stop:
        size_bytes = before[stop] - before[first[stop]]
        found.insert(0, GradientPiece(size_bytes, pieces[stop - 1].ready_s))
        stop = first[stop]
    return found


MERGING: Mapping[str, Rule] = MappingProxyType(
    {
        "at_end": at_end,
        "one_at_end": one_at_end,
        "wait_free": each_layer,
        "merged": merged,
        "optimal": optimal,
    }
)
"""Ways to sum the gradients of a backward by name, each at least as good as ``at_end``."""


def merged_by(name: str, gradients: Gradients, sum_s: SumSeconds) -> list[GradientPiece]:
    """The gradients that are summed together by one of the :data:`MERGING` rules.

    Raises:
        ValueError: there is no such rule.
    """
    if name not in MERGING:
        known = ", ".join(MERGING)
        raise ValueError(f"unknown way to sum gradients {name!r}; known ones: {known}")
    return MERGING[name](gradients, sum_s)
