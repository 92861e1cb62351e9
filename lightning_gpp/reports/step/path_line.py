"""Where the critical path goes along the rows of ranks, the same in every picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_gpp.simulate.timeline.span import Span
from lightning_gpp.simulate.timeline.timeline import Timeline
from lightning_gpp.simulate.timeline.transfer import Transfer, TransferKind


@dataclass(frozen=True, slots=True)
class PathPiece:
    """A piece of the line along one row.

    Attributes:
        start_s: where it begins.
        end_s: where it ends.
        rank: whose row.
        span: along which span; None along a sum of gradients.
    """

    start_s: float
    end_s: float
    rank: int
    span: Span | None = None


def path_pieces(timeline: Timeline) -> Iterator[PathPiece]:
    """The pieces in the order of time.

    A message is no piece: the line goes from its sender to its receiver. A sum goes along the row
    of the rank that the line comes from, where that takes part in it.
    """
    rank = 0
    for segment in timeline.path_segments:
        item, times = segment.item, (segment.start_s, segment.end_s)
        if not segment.duration_s:
            continue
        if isinstance(item, Span):
            rank = item.rank
            yield PathPiece(*times, rank, item)
        elif isinstance(item, Transfer) and item.kind is TransferKind.SUM:
            rank = rank if rank in item.ranks else item.ranks[0]
            yield PathPiece(*times, rank)
