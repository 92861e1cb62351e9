"""Timelines as a trace for Perfetto (https://ui.perfetto.dev) or ``chrome://tracing``.

The format is the JSON object format of "Trace Event Format" (Google, 2016): complete events
(``"X"``) for spans and transfers, metadata events (``"M"``) for names and order, flow events
(``"s"``, ``"f"``) for messages. Each timeline is a process, each of its ranks and each lane of a
channel is a thread. Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_gpp.graph import FEED
from lightning_gpp.reports.step.paint import lanes
from lightning_gpp.simulate.timeline.span import Span, SpanKind
from lightning_gpp.simulate.timeline.timeline import Timeline
from lightning_gpp.simulate.timeline.transfer import Transfer
from lightning_gpp.simulate.timeline.words import stage_title, words_of

_US_PER_S = 1e6
Event = dict[str, Any]


def write_trace(timelines: Sequence[Timeline], path: Path) -> None:
    """Writes one trace of some timelines; each is a process called by its source and name."""
    events = [event for pid, one in enumerate(timelines) for event in trace_events(one, pid)]
    steps = {t.full_name: {"step": t.step, "step_s": t.step_s} for t in timelines}
    data = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": steps}
    path.write_text(json.dumps(data, allow_nan=False) + "\n", encoding="utf-8")


def trace_events(timeline: Timeline, pid: int = 0) -> Iterator[Event]:
    """The events of one timeline.

    Args:
        timeline: what is shown.
        pid: number of its process in the trace; processes are shown in this order.
    """

    def event(phase: str, tid: int, name: str, time_s: float | None = None, **more: Any) -> Event:
        found = {"ph": phase, "pid": pid, "tid": tid, "name": name} | more
        return found if time_s is None else found | {"ts": time_s * _US_PER_S}

    yield event("M", 0, "process_name", args={"name": timeline.full_name})
    yield event("M", 0, "process_sort_index", args={"sort_index": pid})
    for tid, lane in enumerate(lanes(timeline)):
        name = f"link {lane.name}"
        if lane.rank is not None:
            name = ", ".join(stage.title for stage in timeline.stages_of(lane.rank))
            name = f"{lane.name} · {name}" if name else lane.name
        yield event("M", tid, "thread_name", args={"name": name})
        yield event("M", tid, "thread_sort_index", args={"sort_index": tid})
        for item, is_critical in zip(lane.items, lane.critical):
            arguments = _arguments(timeline, item) | {"critical": is_critical}
            category = item.kind.category.value if isinstance(item, Span) else "communication"
            look = {"dur": item.duration_s * _US_PER_S, "cat": category, "args": arguments}
            yield event("X", tid, _name(item, timeline), item.start_s, **look)
    for number, (sent, received) in enumerate(timeline.messages()):
        start_s = (sent.start_s + sent.end_s) / 2  # within its span, to which it is tied
        end_s = max(start_s, (received.start_s + received.end_s) / 2)
        tie = {"cat": "message", "id": f"{pid}.{number}"}
        yield event("s", sent.rank, "message", start_s, **tie)
        yield event("f", received.rank, "message", end_s, **tie, bp="e")


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
