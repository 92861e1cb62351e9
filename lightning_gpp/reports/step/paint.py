"""What all pictures of a step have in common: colours, rows, and where the critical path goes.

The colours are those of Okabe and Ito ("Color Universal Design", 2008), which people with any
colour vision can tell apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lightning_gpp.simulate.timeline.span import Span, SpanKind
from lightning_gpp.simulate.timeline.timeline import Timeline
from lightning_gpp.simulate.timeline.transfer import Transfer, TransferKind, transfer_lanes


@dataclass(frozen=True, slots=True)
class Paint:
    """How some kinds of spans and transfers are drawn, and what the legend says.

    Attributes:
        in_lane: whether spans take the lane of their stage, not the whole row of their rank.
    """

    colour: str
    legend: str
    kinds: tuple[SpanKind | TransferKind, ...]
    text: str = "black"
    in_lane: bool = False


PAINTS = (
    Paint("#0072B2", "forward", (SpanKind.FORWARD,), text="white", in_lane=True),
    Paint("#E69F00", "backward", (SpanKind.BACKWARD,), in_lane=True),
    Paint("#56B4E9", "your step around the forward", (SpanKind.FEED, SpanKind.LOSS)),
    Paint(
        "#009E73",
        "communication",
        (
            *(SpanKind.SEND, SpanKind.RECEIVE, SpanKind.REDUCE, SpanKind.FLUSH),
            *(TransferKind.MESSAGE, TransferKind.SUM),
        ),
    ),
    Paint("#C8C8C8", "wait", (SpanKind.WAIT,)),
    Paint(
        "#CC79A7",
        "data, optimizer",
        (
            *(SpanKind.DATA, SpanKind.PREPARE, SpanKind.FINISH),
            *(SpanKind.OPTIMIZER, SpanKind.VALIDATION),
        ),
    ),
)
"""Every kind of span, and of transfer, is in one of them."""

PAINT_OF = {kind: paint for paint in PAINTS for kind in paint.kinds}

IDLE_COLOUR = "#F4F4F4"
MEMORY_COLOUR = "#8C8C8C"
ABOVE_COLOUR = "#D55E00"
PATH_COLOUR = "#000000"


class Lane(NamedTuple):
    """The spans of a rank, or transfers over a channel, in the order of time.

    Attributes:
        name: of the rank or channel.
        rank: None for a channel.
        items: none of which overlap.
        critical: whether each is on the critical path.
    """

    name: str
    rank: int | None
    items: tuple[Span | Transfer, ...]
    critical: tuple[bool, ...]


def lanes(timeline: Timeline) -> Iterator[Lane]:
    """Every rank, then every channel."""
    critical = {id(timeline.spans[index]) for index in timeline.critical_spans}
    for rank in range(timeline.num_ranks):
        spans = timeline.of_rank(rank)
        yield Lane(f"rank {rank}", rank, spans, tuple(id(span) in critical for span in spans))
    for lane in transfer_lanes(timeline.transfers):
        items = tuple(timeline.transfers[index] for index in lane.transfers)
        flags = tuple(index in timeline.critical_transfers for index in lane.transfers)
        yield Lane(lane.name, None, items, flags)


class PathPiece(NamedTuple):
    """A piece of the critical path along the row of a rank.

    Attributes:
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
        item = segment.item
        if not segment.duration_s:
            continue
        if isinstance(item, Span):
            rank = item.rank
            yield PathPiece(segment.start_s, segment.end_s, rank, item)
        elif item.kind is TransferKind.SUM:
            rank = rank if rank in item.ranks else item.ranks[0]
            yield PathPiece(segment.start_s, segment.end_s, rank)
