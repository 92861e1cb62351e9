"""Timelines as a trace for Perfetto (https://ui.perfetto.dev) or ``chrome://tracing``.

The format is the JSON object format of "Trace Event Format" (Google, 2016): complete events
(``"X"``) for spans and transfers, metadata events (``"M"``) for names and order, flow events
(``"s"``, ``"f"``) for messages, counter events (``"C"``) for memory. Each timeline is a process;
its critical path, each of its ranks and each lane of a channel is a thread. Times are
microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_gpp.graph import FEED
from lightning_gpp.reports.step.paint import lanes
from lightning_gpp.simulate.timeline.shares import shares
from lightning_gpp.simulate.timeline.span import Span, SpanKind
from lightning_gpp.simulate.timeline.timeline import PathSegment, Timeline
from lightning_gpp.simulate.timeline.transfer import Transfer
from lightning_gpp.simulate.timeline.words import stage_title, words_of

_US_PER_S = 1e6

_COLOURS = {
    "forward": "thread_state_running",
    "backward": "thread_state_iowait",
    "communication": "rail_animation",
    "wait": "grey",
    "other": "rail_idle",
}
"""Categories in the reserved colours of chrome://tracing; Perfetto has colours of its own."""


def write_trace(timelines: Sequence[Timeline], path: Path) -> None:
    """Writes one trace of some timelines; each is a process called by its source and name."""
    data = {
        "traceEvents": [
            event for pid, timeline in enumerate(timelines) for event in trace_events(timeline, pid)
        ],
        "displayTimeUnit": "ms",
        "otherData": {
            timeline.full_name: {
                "step": timeline.step,
                "step_s": timeline.step_s,
                "schedule": timeline.schedule,
                "bubble_share": shares(timeline).bubble_share,
                "clock_error_s": list(timeline.clock_error_s),
            }
            for timeline in timelines
        },
    }
    path.write_text(json.dumps(data, allow_nan=False) + "\n", encoding="utf-8")


def trace_events(timeline: Timeline, pid: int = 0) -> Iterator[dict[str, Any]]:
    """The events of one timeline.

    Args:
        timeline: what is shown.
        pid: number of its process in the trace; processes are shown in this order.
    """
    yield _metadata(pid, 0, "process_name", name=timeline.full_name)
    yield _metadata(pid, 0, "process_sort_index", sort_index=pid)
    shown = list(lanes(timeline))
    if timeline.critical_path:
        yield from _thread(pid, len(shown), "critical path", order=-1)
    for segment in timeline.path_segments:
        on_its_way = "" if isinstance(segment.item, Span) else ", on its way"
        name = _name(segment.item, timeline) + on_its_way
        if segment.duration_s:
            yield _complete(pid, len(shown), segment, segment.item, name, {})
    for tid, lane in enumerate(shown):
        name = f"link {lane.name}"
        if lane.rank is not None:
            stages = ", ".join(stage.title for stage in timeline.stages_of(lane.rank))
            name = f"{lane.name} · {stages}" if stages else lane.name
        yield from _thread(pid, tid, name, order=tid)
        for item, is_critical in zip(lane.items, lane.critical):
            arguments = _arguments(timeline, item) | {"critical": is_critical}
            yield _complete(pid, tid, item, item, _name(item, timeline), arguments)
    for number, (sent, received) in enumerate(timeline.messages()):
        flow = {"name": "message", "cat": "message", "id": f"{pid}.{number}", "pid": pid}
        start_s = (sent.start_s + sent.end_s) / 2  # within its span, to which it is tied
        end_s = max(start_s, (received.start_s + received.end_s) / 2)
        yield flow | {"ph": "s", "tid": sent.rank, "ts": start_s * _US_PER_S}
        yield flow | {"ph": "f", "bp": "e", "tid": received.rank, "ts": end_s * _US_PER_S}
    for curve in timeline.memory:
        counter = {"ph": "C", "pid": pid, "tid": curve.rank, "name": f"memory of rank {curve.rank}"}
        for time_s, used_bytes in zip(curve.times_s, curve.used_bytes):
            yield counter | {"ts": time_s * _US_PER_S, "args": {"bytes": used_bytes}}


def _thread(pid: int, tid: int, name: str, *, order: int) -> Iterator[dict[str, Any]]:
    yield _metadata(pid, tid, "thread_name", name=name)
    yield _metadata(pid, tid, "thread_sort_index", sort_index=order)


def _metadata(pid: int, tid: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _complete(
    pid: int,
    tid: int,
    when: Span | Transfer | PathSegment,
    item: Span | Transfer,
    name: str,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    category = item.kind.category.value if isinstance(item, Span) else "communication"
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": when.start_s * _US_PER_S,
        "dur": when.duration_s * _US_PER_S,
        "name": name,
        "cat": category,
        "cname": _COLOURS[category],
        "args": arguments,
    }


def _name(item: Span | Transfer, timeline: Timeline) -> str:
    """The action in words, with what part of it this is."""
    words = words_of(item, timeline)
    is_part = item.kind in (SpanKind.WAIT, SpanKind.LOSS, SpanKind.FEED)
    return f"{item.kind.value}: {words}" if is_part and item.action is not None else words


def _arguments(timeline: Timeline, item: Span | Transfer) -> dict[str, Any]:
    """What Perfetto shows of a slice that is clicked at."""
    arguments: dict[str, Any] = {"kind": item.kind.value, "minibatch": item.minibatch}
    if item.size_bytes is not None:
        arguments["bytes"] = item.size_bytes
    if isinstance(item, Transfer):
        return arguments | {"ranks": list(item.ranks), "channels": list(item.channels)}
    if item.action is not None:
        arguments |= {"stage": stage_title(item.parsed.stage, timeline.stages)}
        arguments |= {"microbatch": item.microbatch, "action": item.action}
        if item.parsed.kind.is_compute and item.stage not in (None, FEED):
            stage = timeline.stages[item.parsed.stage]
            arguments |= {"label": stage.label, "operators": ", ".join(stage.operators)}
    if item.updates is not None:
        arguments["updates_before"] = item.updates
    return arguments
