"""Timelines as a trace for Perfetto (https://ui.perfetto.dev) or ``chrome://tracing``.

The format is the JSON object format of "Trace Event Format" (Google, 2016): complete events
(``"X"``) for spans and transfers, metadata events (``"M"``) for names and order, flow events
(``"s"``, ``"f"``) for messages, counter events (``"C"``) for memory. Each timeline is a process;
its critical path, each of its ranks and each lane of a channel is a thread. Times are
microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_gpp.graph import FEED
from lightning_gpp.schedule import Action
from lightning_gpp.simulate.timeline.shares import shares
from lightning_gpp.simulate.timeline.span import Span, SpanKind
from lightning_gpp.simulate.timeline.timeline import MemoryCurve, PathSegment, Timeline
from lightning_gpp.simulate.timeline.transfer import Transfer, TransferLane, transfer_lanes
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
    path.write_text(json.dumps(trace(timelines), allow_nan=False) + "\n", encoding="utf-8")


def trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The trace as plain data."""
    events = [
        event for pid, timeline in enumerate(timelines) for event in trace_events(timeline, pid)
    ]
    return {
        "traceEvents": events,
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


def trace_events(timeline: Timeline, pid: int = 0) -> Iterator[dict[str, Any]]:
    """The events of one timeline.

    Args:
        timeline: what is shown.
        pid: number of its process in the trace; processes are shown in this order.
    """
    yield _metadata(pid, 0, "process_name", name=timeline.full_name)
    yield _metadata(pid, 0, "process_sort_index", sort_index=pid)
    for rank in range(timeline.num_ranks):
        stages = ", ".join(stage.title for stage in timeline.stages_of(rank))
        what = f" · {stages}" if stages else ""
        yield from _thread(pid, rank, f"rank {rank}{what}")
    for index, span in enumerate(timeline.spans):
        yield _span(timeline, span, pid, is_critical=index in timeline.critical_spans)
    lanes = transfer_lanes(timeline.transfers)
    for tid, lane in enumerate(lanes, start=timeline.num_ranks):
        yield from _lane(timeline, lane, pid, tid)
    yield from _path(timeline, pid, timeline.num_ranks + len(lanes))
    yield from _messages(timeline, pid)
    for curve in timeline.memory:
        yield from _memory(curve, pid)


def _lane(timeline: Timeline, lane: TransferLane, pid: int, tid: int) -> Iterator[dict[str, Any]]:
    """A thread for what goes over a channel."""
    yield from _thread(pid, tid, f"link {lane.name}")
    for index in lane.transfers:
        transfer = timeline.transfers[index]
        arguments: dict[str, Any] = {
            "kind": transfer.kind.value,
            "ranks": list(transfer.ranks),
            "channels": list(transfer.channels),
            "critical": index in timeline.critical_transfers,
        }
        if transfer.size_bytes is not None:
            arguments["bytes"] = transfer.size_bytes
        yield _complete(
            pid, tid, transfer, words_of(transfer, timeline), "communication", arguments
        )


def _path(timeline: Timeline, pid: int, tid: int) -> Iterator[dict[str, Any]]:
    """A thread, above all others, for the critical path."""
    segments = timeline.path_segments
    if segments:
        yield from _thread(pid, tid, "critical path", order=-1)
    for segment in segments:
        item = segment.item
        if isinstance(item, Span):
            name = event_name(item, timeline)
        else:
            name = f"{words_of(item, timeline)}, on its way"
        category = item.kind.category.value if isinstance(item, Span) else "communication"
        where = {"rank": item.rank} if isinstance(item, Span) else {"ranks": list(item.ranks)}
        if segment.duration_s:
            yield _complete(pid, tid, segment, name, category, where)


def _messages(timeline: Timeline, pid: int) -> Iterator[dict[str, Any]]:
    """Arrows from the send to the receive of every message."""
    for number, (sent, received) in enumerate(timeline.messages()):
        flow = {"name": "message", "cat": "message", "id": f"{pid}.{number}", "pid": pid}
        start_s = (sent.start_s + sent.end_s) / 2  # within its span, to which it is tied
        end_s = max(start_s, (received.start_s + received.end_s) / 2)
        yield flow | {"ph": "s", "tid": sent.rank, "ts": start_s * _US_PER_S}
        yield flow | {"ph": "f", "bp": "e", "tid": received.rank, "ts": end_s * _US_PER_S}


def _memory(curve: MemoryCurve, pid: int) -> Iterator[dict[str, Any]]:
    """A counter; a curve of its own in Perfetto."""
    for time_s, used_bytes in zip(curve.times_s, curve.used_bytes):
        yield {
            "ph": "C",
            "pid": pid,
            "tid": curve.rank,
            "name": f"memory of rank {curve.rank}",
            "ts": time_s * _US_PER_S,
            "args": {"bytes": used_bytes},
        }


def _thread(pid: int, tid: int, name: str, order: int | None = None) -> Iterator[dict[str, Any]]:
    yield _metadata(pid, tid, "thread_name", name=name)
    yield _metadata(pid, tid, "thread_sort_index", sort_index=tid if order is None else order)


def _metadata(pid: int, tid: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _span(timeline: Timeline, span: Span, pid: int, *, is_critical: bool) -> dict[str, Any]:
    arguments = _arguments(timeline, span) | {"critical": is_critical}
    return _complete(
        pid, span.rank, span, event_name(span, timeline), span.kind.category.value, arguments
    )


def _complete(
    pid: int,
    tid: int,
    item: Span | Transfer | PathSegment,
    name: str,
    category: str,
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": item.start_s * _US_PER_S,
        "dur": item.duration_s * _US_PER_S,
        "name": name,
        "cat": category,
        "cname": _COLOURS[category],
        "args": dict(arguments),
    }


def event_name(span: Span, timeline: Timeline) -> str:
    """What a span is called: its action in words, with what part of it this is."""
    if span.kind in (SpanKind.WAIT, SpanKind.LOSS, SpanKind.FEED) and span.action is not None:
        return f"{span.kind.value}: {words_of(span, timeline)}"
    return words_of(span, timeline)


def _arguments(timeline: Timeline, span: Span) -> dict[str, Any]:
    """What Perfetto shows of a span that is clicked at."""
    arguments: dict[str, Any] = {"kind": span.kind.value}
    if span.action is not None:
        action = Action.parse(span.action)
        arguments |= {"stage": stage_title(action.stage, timeline.stages)}
        arguments |= {"microbatch": action.microbatch, "action": span.action}
        if action.kind.is_compute and action.stage != FEED:
            stage = timeline.stages[action.stage]
            arguments |= {"label": stage.label, "operators": ", ".join(stage.operators)}
        if action.peer is not None:
            arguments["peer"] = stage_title(action.peer, timeline.stages)
    if span.size_bytes is not None:
        arguments["bytes"] = span.size_bytes
    if span.updates is not None:
        arguments["updates_before"] = span.updates
    return arguments | {"minibatch": span.minibatch}
