"""From what every rank recorded to the timeline of the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from lightning_gpp.graph import FEED
from lightning_gpp.runtime.action_record import ActionRecord
from lightning_gpp.runtime.clock import ClockOffset
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
        remaining: mini-batches that follow, as far as they are read ahead.
        updates: of this rank's parameters before it.
    """

    since: int
    remaining: int
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

    def followed_by(
        self, actions: Sequence[ActionRecord], end_ns: int, still_ns: int = 0
    ) -> RunRecord:
        """The same run with its next part.

        Args:
            actions: of the part.
            end_ns: when it was over.
            still_ns: how long emulated time had stood still between the parts; what was recorded
                moves together by as much, as far as there is room (a send may end late: it takes no
                emulated time).
        """
        if self.actions and actions:
            still_ns = max(0, min(still_ns, actions[0].start_ns - self.actions[-1].end_ns))
        moved = (
            replace(r, start_ns=r.start_ns - still_ns, end_ns=r.end_ns - still_ns) for r in actions
        )
        return RunRecord((*self.actions, *moved), end_ns - still_ns)


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What one rank did in a step: the runs of its mini-batches, and what was around them.

    Or in several steps in a row, where the pipeline does not drain between them: a window of each.
    """

    runs: tuple[RunRecord, ...]
    marks: tuple[Mark, ...]


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
    pieces = [
        piece
        for rank, (record, clock) in enumerate(zip(records, clocks, strict=True))
        for piece in _pieces(rank, record, clock.offset_ns)
    ]
    zero_ns = min(piece.start_ns for piece in pieces)
    last_ns = max(piece.end_ns for piece in pieces)
    arrivals = _arrivals(pieces)
    per_ns_s = 1e-9 / (time_scale or 1.0)
    overlaps = records[0].runs[0].window is not None
    timeline = Timeline(
        source="measured" if time_scale is None else "emulated",
        step_s=(last_ns - zero_ns) * per_ns_s,
        devices=tuple(rank_of_device.index(rank) for rank in range(len(records))),
        schedule=schedule,
        stages=stages,
        spans=tuple(
            part.span(zero_ns, per_ns_s)
            for piece in pieces
            for part in _split(piece, arrivals.get(piece.meeting))
        ),
        step=step,
        clock_error_s=tuple(clock.error_ns * per_ns_s for clock in clocks),
        num_minibatches=len(records[0].runs) if overlaps else 1,
        weights=weights if overlaps else "",
    )
    return with_inferred_path(timeline)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A span on the clock of rank 0, and the action it comes from."""

    rank: int
    kind: SpanKind
    start_ns: int
    end_ns: int
    minibatch: int = 0
    action: Action | None = None
    size_bytes: int | None = None
    updates: int | None = None

    @property
    def meeting(self) -> tuple[object, ...] | None:
        """What ranks have to come to before it can go on.

        A message, a sum of gradients, or the end of rank 0's actions.
        """
        if self.kind is SpanKind.FINISH:
            return (self.minibatch, SpanKind.FINISH)
        if self.action is None or self.kind not in (*_MEETINGS, SpanKind.SEND):
            return None
        if self.action.kind is Kind.REDUCE:
            return (self.minibatch, self.action.microbatch)
        return (self.minibatch, *self.action.message)

    def span(self, zero_ns: int, per_ns_s: float) -> Span:
        return Span(
            rank=self.rank,
            kind=self.kind,
            start_s=(self.start_ns - zero_ns) * per_ns_s,
            end_s=(self.end_ns - zero_ns) * per_ns_s,
            action=None if self.action is None else str(self.action),
            size_bytes=self.size_bytes,
            minibatch=self.minibatch,
            updates=self.updates if self.kind in (SpanKind.FORWARD, SpanKind.BACKWARD) else None,
        )


def _pieces(rank: int, record: RankRecord, offset_ns: int) -> Iterator[_Piece]:
    """What a rank recorded, on the clock of rank 0."""

    def piece(kind: SpanKind, start_ns: int, end_ns: int, *more: Any) -> _Piece:
        return _Piece(rank, kind, start_ns + offset_ns, end_ns + offset_ns, *more)

    for mark in record.marks:
        yield piece(mark.kind, mark.start_ns, mark.end_ns, mark.minibatch)
    for minibatch, run in enumerate(record.runs):
        # Messages go from window to window: the actions of all of them are of one run.
        number, updates = (minibatch, None) if run.window is None else (0, run.window.updates)
        for each in run.actions:
            kind, end_ns = _kind(each.action), each.end_ns
            if kind is SpanKind.FORWARD and each.loss_start_ns is not None:
                end_ns = each.loss_start_ns
                yield piece(SpanKind.LOSS, end_ns, each.end_ns, number, each.action)
            more = number, each.action, each.size_bytes, updates
            yield piece(kind, each.start_ns, end_ns, *more)
        if run.actions:
            yield piece(SpanKind.FLUSH, run.actions[-1].end_ns, run.end_ns, minibatch)


def _kind(action: Action) -> SpanKind:
    if action.kind is Kind.FORWARD and action.stage == FEED:
        return SpanKind.FEED
    return SPANS[action.kind]


def _arrivals(pieces: Sequence[_Piece]) -> dict[tuple[object, ...] | None, int]:
    """When the last rank came to each meeting: the sender of a message, all of a sum, rank 0."""
    arrivals: dict[tuple[object, ...] | None, int] = {}
    for piece in pieces:
        is_end = piece.kind is SpanKind.FINISH and piece.rank == 0
        if is_end or piece.kind in (SpanKind.SEND, SpanKind.REDUCE):
            known_ns = arrivals.get(piece.meeting, piece.start_ns)
            arrivals[piece.meeting] = max(known_ns, piece.start_ns)
    return arrivals


def _split(piece: _Piece, arrival_ns: int | None) -> Iterator[_Piece]:
    """A receive as its wait, until the message was sent, and the rest; likewise other meetings."""
    if piece.kind not in _MEETINGS or arrival_ns is None:
        yield piece
        return
    met_ns = min(max(piece.start_ns, arrival_ns), piece.end_ns)
    if met_ns > piece.start_ns:
        yield replace(piece, kind=SpanKind.WAIT, end_ns=met_ns, size_bytes=None)
    yield replace(piece, start_ns=met_ns)
