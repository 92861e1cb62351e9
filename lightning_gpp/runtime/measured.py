"""Builds the timeline of a step from the records of all ranks, on rank 0's clock.

The clock is ``time.monotonic_ns``. Processes of one host share it. Between hosts the time of day
joins them, which is as exact as their operating systems keep it (NTP).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from lightning_gpp.graph import FEED
from lightning_gpp.runtime.run_state import ActionRecord
from lightning_gpp.schedule import Action, Kind
from lightning_gpp.simulate import Span, SpanKind, Timeline, TimelineStage
from lightning_gpp.simulate.timeline.measured_path import with_inferred_path

_SAME_NS = 1_000_000
"""Clocks that differ by less are one, read at different moments."""

_MEETINGS = (SpanKind.RECEIVE, SpanKind.REDUCE, SpanKind.FINISH)
_OTHERWISE = {Kind.STEP: "OPTIMIZER"}
SPANS: Mapping[Kind, SpanKind] = {
    kind: SpanKind[name]
    for kind in Kind
    if (name := _OTHERWISE.get(kind, kind.name.partition("_")[0])) in SpanKind.__members__
}
"""What is shown of each kind of action; the forward of the feed is the user's step before it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something outside of the program's actions, on this rank's monotonic clock.

    Attributes:
        kind: what happened.
        start_ns: when it began.
        end_ns: when it ended.
        minibatch: the run to which it belongs.
    """

    kind: SpanKind
    start_ns: int
    end_ns: int
    minibatch: int = 0


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run of a program: when each action ran, and when the run ended.

    Attributes:
        actions: the actions and their times.
        end_ns: when the run ended.
    """

    actions: tuple[ActionRecord, ...]
    end_ns: int


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank's part of a step: its runs, and what happened around them."""

    runs: tuple[RunRecord, ...]
    marks: tuple[Mark, ...]


def measured_timeline(
    records: Sequence[RankRecord],
    leads_ns: Sequence[int],
    *,
    step: int,
    rank_of_device: Sequence[int],
    schedule: str,
    stages: tuple[TimelineStage, ...],
    time_scale: float | None = None,
) -> Timeline:
    """Puts the records of all ranks on the clock of rank 0.

    Args:
        records: of every rank.
        leads_ns: of every rank the :func:`clock_lead_ns`.
        step: optimizer steps done before this one.
        rank_of_device: rank of every device of the plan.
        schedule: name of the schedule.
        stages: the stages.
        time_scale: of emulated devices how many real seconds one of theirs took; the timeline is
            in theirs.

    Raises:
        ValueError: nothing was recorded, or the ranks did not record the same runs.
    """
    if len({len(record.runs) for record in records}) != 1 or not records[0].runs:
        counts = [len(record.runs) for record in records]
        raise ValueError(f"the ranks recorded {counts} runs of programs; expected equally many")
    offsets_ns = _offsets_ns(leads_ns)
    zero_ns = min(
        each.start_ns + offset_ns
        for record, offset_ns in zip(records, offsets_ns, strict=True)
        for each in chain[Mark | ActionRecord](record.marks, *(run.actions for run in record.runs))
    )
    per_ns_s = 1e-9 / (time_scale or 1.0)
    spans = [
        span
        for rank, (record, offset_ns) in enumerate(zip(records, offsets_ns, strict=True))
        for span in _spans(rank, record, offset_ns - zero_ns, per_ns_s)
    ]
    arrivals = _arrivals(spans)
    timeline = Timeline(
        source="measured" if time_scale is None else "emulated",
        step_s=max(span.end_s for span in spans),
        devices=tuple(rank_of_device.index(rank) for rank in range(len(records))),
        schedule=schedule,
        stages=stages,
        spans=tuple(part for span in spans for part in _split(span, arrivals.get(_meeting(span)))),
        step=step,
    )
    return with_inferred_path(timeline)


def _spans(rank: int, record: RankRecord, shift_ns: int, per_ns_s: float) -> Iterator[Span]:
    """What a rank recorded, from the beginning of the step on the clock of rank 0."""

    def span(kind: SpanKind, start_ns: int, end_ns: int, **more: Any) -> Span:
        start_s, end_s = (start_ns + shift_ns) * per_ns_s, (end_ns + shift_ns) * per_ns_s
        return Span(rank, kind, start_s, end_s, **more)

    for mark in record.marks:
        yield span(mark.kind, mark.start_ns, mark.end_ns, minibatch=mark.minibatch)
    for minibatch, run in enumerate(record.runs):
        for each in run.actions:
            kind, end_ns, action = _kind(each.action), each.end_ns, str(each.action)
            if kind is SpanKind.FORWARD and each.loss_start_ns is not None:
                end_ns = each.loss_start_ns
                loss = SpanKind.LOSS
                yield span(loss, end_ns, each.end_ns, action=action, minibatch=minibatch)
            yield span(
                kind,
                each.start_ns,
                end_ns,
                action=action,
                size_bytes=each.size_bytes,
                minibatch=minibatch,
            )
        if run.actions:
            yield span(SpanKind.FLUSH, run.actions[-1].end_ns, run.end_ns, minibatch=minibatch)


def _kind(action: Action) -> SpanKind:
    if action.kind is Kind.FORWARD and action.stage == FEED:
        return SpanKind.FEED
    return SPANS[action.kind]


def _meeting(span: Span) -> tuple[object, ...] | None:
    """What ranks have to come to before a span can go on.

    A message, a sum of gradients, or the end of rank 0's actions.
    """
    if span.kind is SpanKind.FINISH:
        return (span.minibatch, SpanKind.FINISH)
    if span.action is None or span.kind not in (*_MEETINGS, SpanKind.SEND):
        return None
    action = span.parsed
    if action.kind is Kind.REDUCE:
        return (span.minibatch, action.microbatch)
    return (span.minibatch, *action.message)


def _arrivals(spans: Sequence[Span]) -> dict[tuple[object, ...] | None, float]:
    """When the last rank came to each meeting: the sender of a message, all of a sum, rank 0."""
    arrivals: dict[tuple[object, ...] | None, float] = {}
    for span in spans:
        is_end = span.kind is SpanKind.FINISH and span.rank == 0
        if is_end or span.kind in (SpanKind.SEND, SpanKind.REDUCE):
            meeting = _meeting(span)
            arrivals[meeting] = max(arrivals.get(meeting, 0.0), span.start_s)
    return arrivals


def _split(span: Span, arrival_s: float | None) -> Iterator[Span]:
    """A receive as its wait, until the message was sent, and the rest; likewise other meetings."""
    if span.kind not in _MEETINGS or arrival_s is None:
        yield span
        return
    met_s = min(max(span.start_s, arrival_s), span.end_s)
    if met_s > span.start_s:
        yield replace(span, kind=SpanKind.WAIT, end_s=met_s, size_bytes=None)
    yield replace(span, start_s=met_s)


def clock_lead_ns() -> int:
    """By how much the time of day is ahead of ``time.monotonic_ns`` on this host."""
    return time.time_ns() - time.monotonic_ns()


def _offsets_ns(leads_ns: Sequence[int]) -> list[int]:
    """What is added to the times of every rank to get those of rank 0.

    >>> _offsets_ns([5_000_000_000, 5_000_000_700, 2_000_000_000])
    [0, 0, -3000000000]
    """
    offsets_ns = [lead_ns - leads_ns[0] for lead_ns in leads_ns]
    return [0 if abs(each) < _SAME_NS else each for each in offsets_ns]
