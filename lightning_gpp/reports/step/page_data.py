"""What the page of a step shows, as plain data for its script.

Lanes hold their items column by column (all starts, all durations, …), so that a step with tens of
thousands of spans stays a small file. Texts that repeat are numbers into the list ``texts``. Times
are seconds, to the nanosecond; sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lightning_gpp.common.units_of_measure import count_text, percent_text
from lightning_gpp.reports.step.paint import (
    ABOVE_COLOUR,
    IDLE_COLOUR,
    MEMORY_COLOUR,
    PAINT_OF,
    PAINTS,
    PATH_COLOUR,
)
from lightning_gpp.reports.step.path_line import path_pieces
from lightning_gpp.reports.step.picture_memory import peak_text
from lightning_gpp.reports.step.picture_text import path_text, subtitle, title
from lightning_gpp.simulate.timeline.shares import shares
from lightning_gpp.simulate.timeline.span import Span, SpanKind
from lightning_gpp.simulate.timeline.timeline import MemoryCurve, Timeline
from lightning_gpp.simulate.timeline.transfer import Transfer, transfer_lanes
from lightning_gpp.simulate.timeline.versions import Met, met_by_backwards
from lightning_gpp.simulate.timeline.words import words_of

WHOLE_ROW = -1
"""Instead of the number of a stage's lane within the row of its rank."""


def page_data(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """All that the script needs.

    Raises:
        ValueError: there is no timeline.
    """
    if not timelines:
        raise ValueError("a page needs at least one timeline, got none")
    texts = _Texts()
    measured = next((t for t in timelines if t.source != "predicted"), None)
    seen = [span.kind for timeline in timelines for span in timeline.spans if span.duration_s]
    present = {PAINT_OF[kind] for kind in seen}
    present |= {PAINT_OF[item.kind] for timeline in timelines for item in timeline.transfers}
    return {
        "until": max(timeline.step_s for timeline in timelines),
        "paints": [
            {
                "colour": paint.colour,
                "text": paint.text,
                "legend": paint.legend if paint in present else None,
            }
            for paint in PAINTS
        ],
        "colours": {
            "idle": IDLE_COLOUR,
            "path": PATH_COLOUR,
            "memory": MEMORY_COLOUR,
            "above": ABOVE_COLOUR,
        },
        "timelines": [_timeline(timeline, measured, texts) for timeline in timelines],
        "texts": texts.known,
    }


class _Texts:
    """Gives every text a number."""

    def __init__(self) -> None:
        self.known: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """Its place in ``known``."""
        if text not in self._numbers:
            self._numbers[text] = len(self.known)
            self.known.append(text)
        return self._numbers[text]


def _timeline(timeline: Timeline, measured: Timeline | None, texts: _Texts) -> dict[str, Any]:
    return {
        "title": title(timeline, measured),
        "lines": [text for text in (subtitle(timeline), path_text(timeline)) if text],
        "step": timeline.step_s,
        "stages": [
            {"title": stage.title, "label": stage.label, "operators": ", ".join(stage.operators)}
            for stage in timeline.stages
        ],
        "lanes": [
            *_rank_lanes(timeline, texts),
            *_link_lanes(timeline, texts),
            *(_memory_lane(curve) for curve in timeline.memory),
        ],
        "path": [list(point) for point in _path(timeline)],
    }


def _rank_lanes(timeline: Timeline, texts: _Texts) -> Iterator[dict[str, Any]]:
    found, lanes = shares(timeline).ranks, _lane_of_stage(timeline)
    numbers: dict[int, list[int]] = {rank: [] for rank in range(timeline.num_ranks)}
    for index, span in enumerate(timeline.spans):
        numbers[span.rank].append(index)
    for rank, indices in numbers.items():
        indices.sort(key=lambda i: (timeline.spans[i].start_s, timeline.spans[i].end_s))
        spans = [timeline.spans[index] for index in indices]
        yield {
            "kind": "rank",
            "label": f"rank {rank}",
            "note": f"bubble {percent_text(found[rank].bubble_share, 1)}",
            "stages": [stage.id for stage in timeline.stages_of(rank)],
            "sub": [_sub_lane(span, lanes) for span in spans],
            **_items(timeline, spans, [i in timeline.critical_spans for i in indices], texts),
        }


def _lane_of_stage(timeline: Timeline) -> dict[int | None, int]:
    """Stage -> its lane within the row of its rank."""
    return {
        stage.id: number
        for rank in range(timeline.num_ranks)
        for number, stage in enumerate(timeline.stages_of(rank))
    }


def _sub_lane(span: Span, lane_of_stage: dict[int | None, int]) -> int:
    """Which lane of its rank's row a span is in."""
    in_lane = PAINT_OF[span.kind].in_lane
    return lane_of_stage.get(span.stage, WHOLE_ROW) if in_lane else WHOLE_ROW


def _link_lanes(timeline: Timeline, texts: _Texts) -> Iterator[dict[str, Any]]:
    for lane in transfer_lanes(timeline.transfers):
        transfers = [timeline.transfers[index] for index in lane.transfers]
        critical = [index in timeline.critical_transfers for index in lane.transfers]
        busy_s = sum(transfer.duration_s for transfer in transfers)
        yield {
            "kind": "link",
            "label": lane.name,
            "note": f"busy {percent_text(busy_s, timeline.step_s)}",
            **_items(timeline, transfers, critical, texts),
        }


def _items(
    timeline: Timeline,
    items: Sequence[Span | Transfer],
    critical: Sequence[bool],
    texts: _Texts,
) -> dict[str, Any]:
    """The columns that spans and transfers have in common."""
    met = met_by_backwards(timeline)
    return {
        "start": [_seconds(item.start_s) for item in items],
        "seconds": [_seconds(item.duration_s) for item in items],
        "paint": [PAINTS.index(PAINT_OF[item.kind]) for item in items],
        "name": [texts.number(words_of(item, timeline)) for item in items],
        "what": [texts.number(_what(item, met)) for item in items],
        "bytes": [item.size_bytes for item in items],
        "stage": [item.stage if isinstance(item, Span) else None for item in items],
        "microbatch": [_number(item) for item in items],
        "critical": [int(flag) for flag in critical],
    }


def _what(item: Span | Transfer, met: Met) -> str:
    """Its kind; with the weights that it meets, where these change while batches are in flight."""
    kind: str = item.kind.value
    if not isinstance(item, Span) or item.updates is None:
        return kind
    text, later = f"{kind}, {count_text(item.updates, 'update')} before it", None
    if item.kind is SpanKind.FORWARD:
        later = met.get((item.stage, item.microbatch))
    return text if later is None else f"{text}, {later} before its backward"


def _number(item: Span | Transfer) -> int | None:
    """The number that is written on a bar."""
    is_compute = isinstance(item, Span) and PAINT_OF[item.kind].in_lane
    return item.microbatch if isinstance(item, Span) and is_compute else None


def _memory_lane(curve: MemoryCurve) -> dict[str, Any]:
    return {
        "kind": "memory",
        "label": f"rank {curve.rank}",
        "note": f"peak {peak_text(curve)}",
        "times": [_seconds(time_s) for time_s in curve.times_s],
        "bytes": [round(used) for used in curve.used_bytes],
        "limit": curve.limit_bytes,
    }


def _path(timeline: Timeline) -> Iterator[tuple[float, float, int, int]]:
    """(start, end, rank, lane in its row) of what the critical path goes along."""
    lanes = _lane_of_stage(timeline)
    for piece in path_pieces(timeline):
        sub = WHOLE_ROW if piece.span is None else _sub_lane(piece.span, lanes)
        yield _seconds(piece.start_s), _seconds(piece.end_s), piece.rank, sub


def _seconds(seconds: float) -> float:
    return round(seconds, 9)
