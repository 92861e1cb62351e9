"""What only the spans of a measured step tell: what was on its way, and the critical path.

The critical path is walked from the end of the step to its beginning: from a span to the one before
it on its rank; where a rank waited, to what it waited for, that is to the send of the message, to
what the last rank to come to a sum of gradients did before, or to the user's step. A message that
had been sent before it was asked for held nobody up, as far as spans can tell.

The idea is the critical path of "A DAG Model of Synchronous Stochastic Gradient Descent" (ICPADS
2018, section IV), whose edges are here the order of a rank's actions and the messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_gpp.schedule import Kind
from lightning_gpp.simulate.timeline.span import Span, SpanKind
from lightning_gpp.simulate.timeline.timeline import PathPart, Timeline, message_of
from lightning_gpp.simulate.timeline.transfer import Transfer, TransferKind


def with_inferred_path(timeline: Timeline) -> Timeline:
    """The timeline with the transfers and the critical path that its spans tell."""
    meetings = _Meetings.of(timeline)
    transfers = tuple(
        (_sum if isinstance(meeting, _SumKey) else _message)(timeline, meetings.spans[meeting])
        for meeting in meetings.transfer
    )
    path = tuple(_walk(timeline, meetings))[::-1]
    return replace(timeline, transfers=transfers, critical_path=path)


@dataclass(frozen=True, slots=True)
class _SumKey:
    """Identity of a sum of gradients."""

    minibatch: int
    group: int


@dataclass(frozen=True, slots=True)
class _EndKey:
    """Identity of the end of a mini-batch, which rank 0 tells the others."""

    minibatch: int


@dataclass(frozen=True, slots=True)
class _TurnKey:
    """Identity of the user's step between the two parts of a mini-batch; others wait for it."""

    minibatch: int


_Key = _EndKey | _SumKey | _TurnKey | tuple[int, tuple[int, int, bool, int]]


@dataclass(frozen=True, slots=True)
class _Meetings:
    """What ranks meet for: messages, sums, the user's step, ends of mini-batches.

    Attributes:
        key: index of a span -> its meeting.
        spans: meeting -> indices of its spans, waits included, in the order of their starts;
            only of those with at least two ranks.
        transfer: message or sum -> its index among the transfers.
    """

    key: Mapping[int, _Key]
    spans: Mapping[_Key, Sequence[int]]
    transfer: Mapping[_Key, int]

    @classmethod
    def of(cls, timeline: Timeline) -> _Meetings:
        found: dict[_Key, list[int]] = {}
        keys = _keys(timeline)
        for index in sorted(keys, key=lambda index: timeline.spans[index].start_s):
            found.setdefault(keys[index], []).append(index)
        shared = {
            key: indices
            for key, indices in found.items()
            if len({timeline.spans[index].rank for index in indices}) > 1
        }
        transfers = (key for key in shared if not isinstance(key, (_EndKey, _TurnKey)))
        return cls(keys, shared, {key: number for number, key in enumerate(transfers)})


def _keys(timeline: Timeline) -> dict[int, _Key]:
    """Index of a span -> what it is a meeting for."""
    keys: dict[int, _Key] = {}
    after = {first: second for second, first in _before(timeline.spans).items()}
    for index, span in enumerate(timeline.spans):
        second = after.get(index)
        is_for_end = second is not None and timeline.spans[second].kind is SpanKind.FINISH
        if (key := _key(span, is_for_end)) is not None:
            keys[index] = key
    return keys


def _key(span: Span, is_for_end: bool) -> _Key | None:
    """What a span is a meeting for; of a wait whether the end of a mini-batch follows."""
    if span.action is None:
        if span.kind is SpanKind.FINISH or (span.kind is SpanKind.WAIT and is_for_end):
            return _EndKey(span.minibatch)
        is_turn = span.kind in (SpanKind.LOSS, SpanKind.WAIT)
        return _TurnKey(span.minibatch) if is_turn else None
    if span.parsed.kind.is_compute:
        return None
    if span.parsed.kind is Kind.REDUCE:
        return _SumKey(span.minibatch, span.parsed.microbatch)
    return message_of(span)


def _message(timeline: Timeline, indices: Sequence[int]) -> Transfer:
    """From when it is handed over until its receiver has it."""
    spans = [timeline.spans[index] for index in indices]
    sent = next(span for span in spans if span.kind is SpanKind.SEND)
    received = next(span for span in spans if span.kind is SpanKind.RECEIVE)
    return Transfer(
        TransferKind.MESSAGE,
        sent.start_s,
        max(sent.start_s, received.end_s),  # clocks may be off by more than the message took
        (f"rank {sent.rank} → {received.rank}",),
        (sent.rank, received.rank),
        sent.action,
        sent.size_bytes,
        sent.minibatch,
    )


def _sum(timeline: Timeline, indices: Sequence[int]) -> Transfer:
    """From when its last rank has come until all have the result."""
    spans = [timeline.spans[index] for index in indices]
    ranks = tuple(sorted({span.rank for span in spans}))
    sums = [span for span in spans if span.kind is SpanKind.REDUCE]
    end_s = max(span.end_s for span in sums)
    return Transfer(
        TransferKind.SUM,
        min(end_s, max(span.start_s for span in sums)),
        end_s,
        (f"sum of ranks {', '.join(map(str, ranks))}",),
        ranks,
        sums[0].action,
        sums[0].size_bytes,
        sums[0].minibatch,
    )


def _walk(timeline: Timeline, meetings: _Meetings) -> Iterator[PathPart]:
    """The parts of the critical path, the last one first."""
    before = _before(timeline.spans)
    ends = [(span.end_s, span.start_s, index) for index, span in enumerate(timeline.spans)]
    index = max(ends)[2] if ends else None
    while index is not None:
        span = timeline.spans[index]
        if span.kind is not SpanKind.WAIT:
            yield PathPart(span=index)
            index = before[index]
        elif (key := meetings.key.get(index)) is not None and key in meetings.spans:
            if key in meetings.transfer:
                yield PathPart(transfer=meetings.transfer[key])
            last = _came_last(timeline, key, meetings.spans[key])
            is_cause = timeline.spans[last].kind in (SpanKind.SEND, SpanKind.LOSS)
            index = last if is_cause else before[last]
        else:
            index = before[index]


def _before(spans: Sequence[Span]) -> dict[int, int | None]:
    """Index of a span -> index of the one before it on its rank."""
    last: dict[int, int] = {}
    before: dict[int, int | None] = {}
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].start_s, spans[i].end_s)):
        before[index] = last.get(spans[index].rank)
        last[spans[index].rank] = index
    return before


def _came_last(timeline: Timeline, key: _Key, indices: Sequence[int]) -> int:
    """The first span of a meeting on the rank for which the others waited."""
    first: dict[int, int] = {}
    for index in indices:
        first.setdefault(timeline.spans[index].rank, index)
    if isinstance(key, _EndKey):
        return first[0]
    if isinstance(key, _TurnKey):
        leads = (i for i in first.values() if timeline.spans[i].kind is SpanKind.LOSS)
        return next(leads, first[0])
    if isinstance(key, _SumKey):
        return max(first.values(), key=lambda index: timeline.spans[index].start_s)
    return next(i for i in first.values() if timeline.spans[i].kind is SpanKind.SEND)
