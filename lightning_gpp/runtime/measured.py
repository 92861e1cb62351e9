"""From what every rank recorded to the timeline of the step, on the clock of rank 0.

The clock is ``time.monotonic_ns``. Processes of one host share it. Between hosts the distance is
estimated as Cristian's algorithm does (Distributed Computing 3, 1989): a rank asks rank 0 for the
time several times and trusts the exchange that was back soonest, since its distance is uncertain by
half of what it was under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from lightning_gpp.graph import FEED
from lightning_gpp.runtime.action_record import ActionRecord
from lightning_gpp.runtime.payload import pack_object, unpack
from lightning_gpp.runtime.transport.transport import Tag, Transport
from lightning_gpp.schedule import Action, Kind
from lightning_gpp.simulate import Span, SpanKind, Timeline, TimelineStage
from lightning_gpp.simulate.timeline.measured_path import with_inferred_path

_MEETINGS = (SpanKind.RECEIVE, SpanKind.REDUCE, SpanKind.FINISH)
SPANS: Mapping[Kind, SpanKind] = MappingProxyType(
    {
        Kind.FORWARD: SpanKind.FORWARD,
        Kind.BACKWARD: SpanKind.BACKWARD,
        Kind.SEND_FORWARD: SpanKind.SEND,
        Kind.RECEIVE_FORWARD: SpanKind.RECEIVE,
        Kind.SEND_BACKWARD: SpanKind.SEND,
        Kind.RECEIVE_BACKWARD: SpanKind.RECEIVE,
        Kind.REDUCE: SpanKind.REDUCE,
        Kind.STEP: SpanKind.OPTIMIZER,
    }
)
"""What is shown of each kind of action; the forward of the feed is the user's step before it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something outside of the actions, on this rank's monotonic clock.

    Attributes:
        kind: what.
        start_ns: when it began.
        end_ns: when it was over.
        minibatch: the run that it belongs to.
    """

    kind: SpanKind
    start_ns: int
    end_ns: int
    minibatch: int = 0


@dataclass(frozen=True, slots=True)
class WindowRecord:
    """Where a pipeline that does not drain was in a window.

    Attributes:
        since: mini-batches that went backward since the pipeline was empty.
        updates: of this rank's parameters before it.
    """

    since: int
    updates: int


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run of a program: the actions in order, and when the run was over.

    Attributes:
        actions: what ran, and when.
        end_ns: when the run was over.
        window: where the run is a window of a pipeline that does not drain. Its actions are
            numbered from the mini-batch that goes backward in the first window of the record.
    """

    actions: tuple[ActionRecord, ...]
    end_ns: int
    window: WindowRecord | None = None


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What one rank did in a step: the runs of its mini-batches, and what was around them.

    Or in several steps in a row, where the pipeline does not drain between them: a window of each.
    """

    runs: tuple[RunRecord, ...]
    marks: tuple[Mark, ...]

    def starts_ns(self) -> Iterator[int]:
        """When everything began."""
        yield from (mark.start_ns for mark in self.marks)
        yield from (action.start_ns for run in self.runs for action in run.actions)


def measured_timeline(
    records: Sequence[RankRecord],
    clocks: Sequence[ClockOffset],
    *,
    step: int,
    rank_of_device: Sequence[int],
    schedule: str,
    stages: tuple[TimelineStage, ...],
    weights: str = "",
    time_scale: float | None = None,
) -> Timeline:
    """Puts the records of all ranks on the clock of rank 0.

    Args:
        records: of every rank.
        clocks: of every rank.
        step: optimizer steps done before this one.
        rank_of_device: rank of every device of the plan.
        schedule: name of the schedule.
        stages: the stages.
        weights: name of the policy of weights, which is shown where mini-batches overlap.
        time_scale: of emulated devices how many real seconds one of theirs took; the timeline is
            in theirs.

    Raises:
        ValueError: nothing was recorded, or the ranks did not record the same runs.
    """
    if len({len(record.runs) for record in records}) != 1 or not records[0].runs:
        counts = [len(record.runs) for record in records]
        raise ValueError(f"the ranks recorded {counts} runs of programs; expected equally many")
    zero_ns = min(
        start_ns + clock.offset_ns
        for record, clock in zip(records, clocks, strict=True)
        for start_ns in record.starts_ns()
    )
    per_ns_s = 1e-9 / (time_scale or 1.0)
    spans = [
        span
        for rank, (record, clock) in enumerate(zip(records, clocks, strict=True))
        for span in _spans(rank, record, clock.offset_ns - zero_ns, per_ns_s)
    ]
    arrivals = _arrivals(spans)
    overlaps = records[0].runs[0].window is not None
    timeline = Timeline(
        source="measured" if time_scale is None else "emulated",
        step_s=max(span.end_s for span in spans),
        devices=tuple(rank_of_device.index(rank) for rank in range(len(records))),
        schedule=schedule,
        stages=stages,
        spans=tuple(part for span in spans for part in _split(span, arrivals.get(_meeting(span)))),
        step=step,
        clock_error_s=tuple(clock.error_ns * per_ns_s for clock in clocks),
        num_minibatches=len(records[0].runs) if overlaps else 1,
        weights=weights if overlaps else "",
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
        # Messages go from window to window: the actions of all of them are of one run.
        number, updates = (minibatch, None) if run.window is None else (0, run.window.updates)
        for each in run.actions:
            kind, end_ns, action = _kind(each.action), each.end_ns, str(each.action)
            if kind is SpanKind.FORWARD and each.loss_start_ns is not None:
                end_ns = each.loss_start_ns
                loss = SpanKind.LOSS
                yield span(loss, end_ns, each.end_ns, action=action, minibatch=number)
            seen = updates if kind in (SpanKind.FORWARD, SpanKind.BACKWARD) else None
            yield span(
                kind,
                each.start_ns,
                end_ns,
                action=action,
                size_bytes=each.size_bytes,
                minibatch=number,
                updates=seen,
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


_NUM_EXCHANGES = 16
_CLOCK: Tag = (-5, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How a rank's clock relates to that of rank 0.

    Attributes:
        offset_ns: to be added to the rank's times to get those of rank 0.
        error_ns: by how much that may be off, either way.
    """

    offset_ns: int
    error_ns: int


def measure_offset(
    transport: Transport, *, timeout_s: float, now_ns: Callable[[], int] = time.monotonic_ns
) -> ClockOffset:
    """All ranks, together: this rank's offset to rank 0, 0 where the clock may be the same.

    Raises:
        TransportError: a rank has gone or did not answer in time.
    """

    def received(rank: int) -> Any:
        purpose = "comparing the clocks"
        came = transport.receive(source=rank, tag=_CLOCK, timeout_s=timeout_s, purpose=purpose)
        return unpack(came)

    found = []
    for rank in range(1, transport.num_ranks) if transport.rank == 0 else (0,):
        for _ in range(_NUM_EXCHANGES):
            if transport.rank == 0:
                received(rank)
                transport.send(pack_object(now_ns()), target=rank, tag=_CLOCK)
                continue
            asked_ns = now_ns()
            transport.send(pack_object(None), target=0, tag=_CLOCK)
            there_ns, back_ns = received(0), now_ns()
            error_ns = -((asked_ns - back_ns) // 2)
            found.append(ClockOffset(there_ns - (asked_ns + back_ns) // 2, error_ns))
    transport.flush()
    best = min(found, key=lambda each: each.error_ns, default=ClockOffset(0, 0))
    return best if abs(best.offset_ns) > best.error_ns else ClockOffset(0, 0)
