"""Colours of the kinds of spans and transfers, the same in every picture.

They are those of Okabe and Ito ("Color Universal Design", 2008), which people with any colour
vision can tell apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpp.simulate.timeline.span import SpanKind
from lightning_gpp.simulate.timeline.transfer import TransferKind


@dataclass(frozen=True, slots=True)
class Paint:
    """How some kinds of spans and transfers are drawn, and what the legend says."""

    kinds: tuple[SpanKind, ...]
    colour: str
    legend: str
    text: str = "black"
    transfers: tuple[TransferKind, ...] = ()

    @property
    def in_lane(self) -> bool:
        """Whether it belongs to a stage's lane; else it takes the whole row."""
        return all(kind.category.is_compute for kind in self.kinds) and not self.is_step

    @property
    def is_step(self) -> bool:
        """Whether it is the user's step."""
        return SpanKind.LOSS in self.kinds


PAINTS = (
    Paint((SpanKind.FORWARD,), "#0072B2", "forward", text="white"),
    Paint((SpanKind.BACKWARD,), "#E69F00", "backward"),
    Paint((SpanKind.FEED, SpanKind.LOSS), "#56B4E9", "your step around the forward"),
    Paint(
        (SpanKind.SEND, SpanKind.RECEIVE, SpanKind.REDUCE, SpanKind.FLUSH),
        "#009E73",
        "communication",
        transfers=(TransferKind.MESSAGE, TransferKind.SUM),
    ),
    Paint((SpanKind.WAIT,), "#C8C8C8", "wait"),
    Paint(
        (
            *(SpanKind.DATA, SpanKind.PREPARE, SpanKind.FINISH),
            *(SpanKind.OPTIMIZER, SpanKind.VALIDATION),
        ),
        "#CC79A7",
        "data, optimizer",
        transfers=(TransferKind.COPY,),
    ),
)
"""Every kind of span, and of transfer, is in one of them."""

PAINT_OF = {kind: paint for paint in PAINTS for kind in (*paint.kinds, *paint.transfers)}
"""Kind of a span or a transfer -> how it is drawn."""

IDLE_COLOUR = "#F4F4F4"
MEMORY_COLOUR = "#8C8C8C"
ABOVE_COLOUR = "#D55E00"
PATH_COLOUR = "#000000"
