"""Which weights forwards and backwards of a timeline met, where mini-batches overlap."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_gpp.simulate.timeline.span import Span, SpanKind
from lightning_gpp.simulate.timeline.timeline import Timeline

Met = Mapping[tuple[int | None, int | None], int]
"""(stage, mini-batch) -> updates before its backward."""


def met_by_backwards(timeline: Timeline) -> Met:
    """Updates before the backward of every stage and mini-batch that went backward."""
    return {
        (span.stage, span.microbatch): span.updates
        for span in timeline.spans
        if span.kind is SpanKind.BACKWARD and span.updates is not None
    }


def version_text(span: Span, met: Met) -> str:
    """The updates that a stage's weights had seen, and for a forward by when its backward comes.

    ``"12→15"`` is a forward after 12 updates whose backward comes after 15. Where that is not in
    the timeline, or after as many, it is ``"12"``; empty where batches do not overlap.
    """
    if span.updates is None:
        return ""
    later = met.get((span.stage, span.microbatch), span.updates)
    if span.kind is not SpanKind.FORWARD or later == span.updates:
        return str(span.updates)
    return f"{span.updates}→{later}"
