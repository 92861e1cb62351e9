"""What all pictures of a step share: colours, rows, the critical path, texts.

The colours are those of Okabe and Ito ("Color Universal Design", 2008), which people with any
colour vision can tell apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_gpp.common.units_of_measure import (
    bytes_text,
    count_text,
    number_text,
    percent_text,
)
from lightning_gpp.simulate.timeline.shares import path_shares, shares
from lightning_gpp.simulate.timeline.span import Span, SpanKind, TransferKind
from lightning_gpp.simulate.timeline.timeline import LOSS, MemoryCurve, Timeline, TimelineStage


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


class PathPiece(NamedTuple):
    """A piece of the critical path, on the row of a rank.

    Attributes:
        span: the span that it follows; None along an all-reduce.
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


# Texts -------------------------------------------------------------------------------------------


def title(timeline: Timeline, measured: Timeline | None = None) -> str:
    """The title of a picture: measured or predicted, step time, bubble.

    Args:
        timeline: the step.
        measured: with which a predicted step is compared.
    """
    what = "step" if timeline.step is None else f"step {timeline.step}"
    if timeline.num_minibatches > 1:
        first = "" if timeline.step is None else f" from {timeline.step} on"
        what = f"steps{first}, {timeline.num_minibatches} that overlap"
    name = f" ({timeline.name})" if timeline.name else ""
    beside = ""
    if measured is not None and measured is not timeline and measured.step_s:
        part = timeline.step_s / measured.step_s - 1
        how = "less" if part < 0 else "more"
        beside = f" ({percent_text(abs(part), 1)} {how} than {measured.source})"
    bubble = percent_text(shares(timeline).bubble_share, 1)
    took = f"{number_text(timeline.step_s * 1e3)} ms"
    return f"{timeline.source.capitalize()} {what}{name}: {took}{beside}, bubble {bubble}"


def subtitle(timeline: Timeline) -> str:
    """The schedule, the stages and ranks, the micro-batches."""
    # Replicas are one stage of the plan, and the loss is none.
    of_plan = {s.title.partition(".")[0] for s in timeline.stages if s.title != LOSS}
    parts = [
        f"schedule {timeline.schedule}",
        f"{count_text(len(of_plan), 'stage')} on {count_text(timeline.num_ranks, 'rank')}",
        _batches(timeline),
    ]
    if timeline.weights:
        parts.append(f"weights {timeline.weights}")
    return "  ·  ".join(parts)


def _batches(timeline: Timeline) -> str:
    if timeline.num_minibatches > 1:
        return f"{timeline.num_minibatches} mini-batches"
    minibatches = 1 + max((span.minibatch for span in timeline.spans), default=0)
    text = count_text(num_microbatches(timeline) // minibatches, "micro-batch")
    return f"{text} in each of {minibatches} mini-batches" if minibatches > 1 else text


def num_microbatches(timeline: Timeline) -> int:
    """Most micro-batches that a stage runs forward in the step."""
    forwards = [span.stage for span in timeline.spans if span.kind is SpanKind.FORWARD]
    return max(map(forwards.count, set(forwards)), default=0)


def path_text(timeline: Timeline) -> str:
    """The parts of the critical path as text; empty where the path is not known."""
    if not timeline.critical_path:
        return ""
    found = path_shares(timeline)
    names = {"other": "data and optimizer"}
    parts = [
        f"{names.get(name, name)} {percent_text(share, 1)}"
        for name, share in found.items()
        if share >= 0.005
    ]
    inferred = "" if timeline.source == "predicted" else " (inferred from spans)"
    return f"critical path{inferred}: {', '.join(parts)}"


def peak_text(curve: MemoryCurve) -> str:
    """The peak, and how much there is.

    >>> peak_text(MemoryCurve(0, (0.0,), (3e9,), 16_000_000_000))
    '3.0 of 16.0 GB'
    """
    peak = bytes_text(curve.peak_bytes)
    if curve.limit_bytes is None:
        return peak
    limit = bytes_text(curve.limit_bytes)
    number, unit = peak.split()
    return f"{number} of {limit}" if limit.endswith(f" {unit}") else f"{peak} of {limit}"


def stage_lines(stages: Sequence[TimelineStage], columns: int) -> list[list[str]]:
    """A line of text for every stage."""
    most = 130 // columns
    replicas: dict[tuple[str, str], list[str]] = {}
    for stage in stages:
        if stage.label:
            of_plan = stage.title.partition(".")[0]
            replicas.setdefault((of_plan, stage.label), []).append(stage.name)
    texts = [
        of_plan + (f" ({names[0]} to {names[-1]})" if len(names) > 1 else "") + f": {label}"
        for (of_plan, label), names in replicas.items()
    ]
    texts = [text if len(text) <= most else f"{text[: most - 1]}…" for text in texts]
    num_lines = -(-len(texts) // columns)
    return [texts[number::num_lines] for number in range(num_lines)]
