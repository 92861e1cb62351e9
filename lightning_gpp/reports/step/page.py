"""A step as one HTML page that can be zoomed, for any browser and without a network.

The page holds its data, its style and its script (the files of ``page_files``) and asks for nothing
else; a content security policy in it forbids every request. Lanes hold their items column by column
(all starts, all durations, …), so that a step with tens of thousands of spans stays a small file.
Texts that repeat are numbers into the list ``texts``. Times are seconds, to the nanosecond.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

from lightning_gpp.common.units_of_measure import count_text, percent_text
from lightning_gpp.reports.step.paint import (
    ABOVE_COLOUR,
    IDLE_COLOUR,
    MEMORY_COLOUR,
    PAINT_OF,
    PAINTS,
    PATH_COLOUR,
    path_pieces,
    path_text,
    peak_text,
    subtitle,
    title,
)
from lightning_gpp.simulate.timeline.shares import shares
from lightning_gpp.simulate.timeline.span import Span, SpanKind, Transfer, transfer_lanes
from lightning_gpp.simulate.timeline.timeline import MemoryCurve, Timeline
from lightning_gpp.simulate.timeline.words import Met, met_by_backwards, words_of

SCRIPTS = ("layout", "draw", "hover", "input")
"""Files of the script, in this order."""

WHOLE_ROW = -1
"""Instead of the number of a stage's lane within the row of its rank."""


def page_html(timelines: Sequence[Timeline]) -> str:
    """The text of the page of timelines, one above the other on one time axis."""
    data = page_data(timelines)
    parts = {
        "title": html.escape(" and ".join(timeline["title"] for timeline in data["timelines"])),
        "data": script_json(data),
        "script": "\n".join(_file(f"{name}.js") for name in SCRIPTS),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _file("page.html"))


def script_json(data: object) -> str:
    r"""JSON that can stand in a ``<script>`` element, whatever its texts are.

    >>> script_json("</script><!--")
    '"\\u003c/script\\u003e\\u003c!--"'
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _file(name: str) -> str:
    file = files("lightning_gpp.reports.step") / "page_files" / name
    return file.read_text(encoding="utf-8")


def page_data(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """All that the script needs."""
    texts: dict[str, int] = {}
    measured = next((t for t in timelines if t.source != "predicted"), None)
    present = {s.kind for t in timelines for s in t.spans if s.duration_s}
    present_too = {transfer.kind for t in timelines for transfer in t.transfers}
    return {
        "until": max(timeline.step_s for timeline in timelines),
        "paints": [
            {
                "colour": paint.colour,
                "text": paint.text,
                "legend": paint.legend if {*paint.kinds} & (present | present_too) else None,
            }
            for paint in PAINTS
        ],
        "colours": {
            "idle": IDLE_COLOUR,
            "path": PATH_COLOUR,
            "memory": MEMORY_COLOUR,
            "above": ABOVE_COLOUR,
        },
        "timelines": [
            _timeline(timeline, measured, lambda text: texts.setdefault(text, len(texts)))
            for timeline in timelines
        ],
        "texts": list(texts),
    }


def _timeline(
    timeline: Timeline, measured: Timeline | None, number: Callable[[str], int]
) -> dict[str, Any]:
    numbers = {
        stage.id: place
        for rank in range(timeline.num_ranks)
        for place, stage in enumerate(timeline.stages_of(rank))
    }

    def sub_lane(item: Span | Transfer | None) -> int:
        """The lane within the row of a rank."""
        if not isinstance(item, Span) or item.stage is None or not PAINT_OF[item.kind].in_lane:
            return WHOLE_ROW
        return numbers.get(item.stage, WHOLE_ROW)

    met, found = met_by_backwards(timeline), shares(timeline).ranks

    critical = set(map(id, timeline.critical_path))

    def lane(name: str, items: Sequence[Span | Transfer], rank: int | None) -> dict[str, Any]:
        if rank is None:
            busy_s = sum(item.duration_s for item in items)
            head: dict[str, Any] = {"kind": "link", "label": name}
            head["note"] = f"busy {percent_text(busy_s, timeline.step_s)}"
        else:
            head = {"kind": "rank", "label": name}
            head["note"] = f"bubble {percent_text(found[rank].bubble_share, 1)}"
            head["stages"] = [stage.id for stage in timeline.stages_of(rank)]
            head["sub"] = [sub_lane(item) for item in items]
        return head | {
            "start": [round(item.start_s, 9) for item in items],
            "seconds": [round(item.duration_s, 9) for item in items],
            "paint": [PAINTS.index(PAINT_OF[item.kind]) for item in items],
            "name": [number(words_of(item, timeline)) for item in items],
            "what": [number(_what(item, met)) for item in items],
            "bytes": [item.size_bytes for item in items],
            "stage": [item.stage if isinstance(item, Span) else None for item in items],
            "microbatch": [_number(item) for item in items],
            "critical": [int(id(item) in critical) for item in items],
        }

    ranks = [lane(f"rank {n}", timeline.of_rank(n), n) for n in range(timeline.num_ranks)]
    links = [lane(name, own, None) for name, own in transfer_lanes(timeline.transfers).items()]
    return {
        "title": title(timeline, measured),
        "lines": [text for text in (subtitle(timeline), path_text(timeline)) if text],
        "step": timeline.step_s,
        "stages": [
            {"title": stage.title, "label": stage.label, "operators": ", ".join(stage.operators)}
            for stage in timeline.stages
        ],
        "lanes": [*ranks, *links, *map(_memory_lane, timeline.memory)],
        "path": [
            [round(piece.start_s, 9), round(piece.end_s, 9), piece.rank, sub_lane(piece.span)]
            for piece in path_pieces(timeline)
        ],
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
    return item.microbatch if isinstance(item, Span) and PAINT_OF[item.kind].in_lane else None


def _memory_lane(curve: MemoryCurve) -> dict[str, Any]:
    return {
        "kind": "memory",
        "label": f"rank {curve.rank}",
        "note": f"peak {peak_text(curve)}",
        "times": [round(time_s, 9) for time_s in curve.times_s],
        "bytes": [round(used) for used in curve.used_bytes],
        "limit": curve.limit_bytes,
    }
