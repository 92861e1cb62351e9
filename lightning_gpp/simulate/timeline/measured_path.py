"""Derives messages on their way, and the critical path, from measured spans.

The critical path is walked from the end of the step to its beginning: from a span to the one before
it on its rank; where a rank waited, to what it waited for, that is to the send of the message, to
what the last rank to come to a sum of gradients did before, or to the user's step. A message that
had been sent before it was asked for held nobody up, as far as spans can tell.

The idea is the critical path of "A DAG Model of Synchronous Stochastic Gradient Descent" (ICPADS
2018, section IV), whose edges are here the order of a rank's actions and the messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_gpp.schedule import Kind
from lightning_gpp.simulate.timeline.span import Span, SpanKind, Transfer, TransferKind
from lightning_gpp.simulate.timeline.timeline import Timeline, message_of

MESSAGE, SUM, TURN, END = "message", "sum", "turn", "end"
"""What ranks meet for: messages, sums of gradients, the user's step between the two halves of a
mini-batch, and its end, which rank 0 tells the others."""

Meeting = tuple[str, Any]
"""What it is, and which of its kind."""


def with_inferred_path(timeline: Timeline) -> Timeline:
    """The timeline with the transfers and the critical path that its spans tell."""
    spans = timeline.spans
    order = sorted(range(len(spans)), key=lambda i: (spans[i].start_s, spans[i].end_s))
    before: dict[int, int | None] = {}  # on the same rank
    after: dict[int | None, int] = {}
    last: dict[int, int] = {}
    for index in order:
        before[index] = last.get(spans[index].rank)
        after[before[index]] = last[spans[index].rank] = index
    meeting: dict[int, Meeting] = {}
    members: defaultdict[Meeting, list[int]] = defaultdict(list)
    for index in order:
        following = spans[after[index]].kind if index in after else None
        if (found := _meeting(spans[index], following)) is not None:
            meeting[index] = found
            members[found].append(index)
    shared = {m: own for m, own in members.items() if len({spans[i].rank for i in own}) > 1}
    carried = [m for m in shared if m[0] in (MESSAGE, SUM)]
    transfers = {m: _transfer(m[0], [spans[i] for i in shared[m]]) for m in carried}
    path: list[Span | Transfer] = []
    now = max(order, key=lambda i: (spans[i].end_s, spans[i].start_s, i), default=None)
    while now is not None:
        came_for = meeting.get(now)
        if spans[now].kind is not SpanKind.WAIT:
            path.append(spans[now])
            now = before[now]
        elif came_for in shared:
            if came_for in transfers:
                path.append(transfers[came_for])
            latest = _came_last(spans, came_for[0], shared[came_for])
            is_cause = spans[latest].kind in (SpanKind.SEND, SpanKind.LOSS)
            now = latest if is_cause else before[latest]
        else:
            now = before[now]
    path.reverse()
    return replace(timeline, transfers=tuple(transfers.values()), critical_path=tuple(path))


def _meeting(span: Span, following: SpanKind | None) -> Meeting | None:
    """What a span is a meeting for; the end of a mini-batch may follow a wait."""
    if span.action is None:
        is_wait = span.kind is SpanKind.WAIT
        if span.kind is SpanKind.FINISH or (is_wait and following is SpanKind.FINISH):
            return END, span.minibatch
        return (TURN, span.minibatch) if is_wait or span.kind is SpanKind.LOSS else None
    if span.parsed.kind.is_compute:
        return None
    if span.parsed.kind is Kind.REDUCE:
        return SUM, (span.minibatch, span.parsed.microbatch)
    return None if span.parsed.peer is None else (MESSAGE, message_of(span))


def _came_last(spans: Sequence[Span], what: str, members: Sequence[int]) -> int:
    """The first span of a meeting on the rank for which the others waited."""
    first: dict[int, int] = {}
    for index in members:
        first.setdefault(spans[index].rank, index)
    if what == SUM:
        return max(first.values(), key=lambda index: spans[index].start_s)
    cause = {MESSAGE: SpanKind.SEND, TURN: SpanKind.LOSS, END: None}[what]
    return next((i for i in first.values() if spans[i].kind is cause), first.get(0, members[0]))


def _transfer(what: str, spans: Sequence[Span]) -> Transfer:
    """A message until its receiver has it; a sum from when its last rank has come."""
    if what == SUM:
        ranks = tuple(sorted({span.rank for span in spans}))
        sums = [span for span in spans if span.kind is SpanKind.REDUCE]
        one, kind, end_s = sums[0], TransferKind.SUM, max(span.end_s for span in sums)
        start_s = min(end_s, max(span.start_s for span in sums))
        channel = f"sum of ranks {', '.join(map(str, ranks))}"
    else:
        one = next(span for span in spans if span.kind is SpanKind.SEND)
        received = next(span for span in spans if span.kind is SpanKind.RECEIVE)
        kind, start_s, ranks = TransferKind.MESSAGE, one.start_s, (one.rank, received.rank)
        end_s = max(start_s, received.end_s)  # clocks may be off by more than the message took
        channel = f"rank {one.rank} → {received.rank}"
    where = (channel,), ranks, one.action, one.size_bytes, one.minibatch
    return Transfer(kind, start_s, end_s, *where)
