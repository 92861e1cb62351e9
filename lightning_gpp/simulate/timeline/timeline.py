"""A timeline: what every rank did in one optimizer step, measured or predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from lightning_gpp.simulate.timeline.span import Span, SpanKind, Transfer


@dataclass(frozen=True, slots=True)
class TimelineStage:
    """A stage, as timelines show it.

    Attributes:
        id: of the stage in the program, which counts replicas.
        rank: where it runs.
        label: a short text for its operators.
        operators: their names.
        name: what the plan calls it: its number there, ``"3.1"`` for replica 1 of stage 3,
            ``"loss"`` for the stage that only takes the outputs of replicas.
    """

    id: int
    rank: int
    label: str = ""
    operators: tuple[str, ...] = ()
    name: str = ""

    @property
    def title(self) -> str:
        """The stage's name for people.

        >>> TimelineStage(5, 0, name="3.1").title, TimelineStage(5, 0).title
        ('stage 3.1', 'stage 5')
        """
        return self.name if self.name == LOSS else f"stage {self.name or self.id}"


LOSS = "loss"
"""Name of the stage that only takes the outputs of replicas."""


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Memory in use on a rank during the step.

    Attributes:
        rank: whose.
        times_s: when it changes, ascending, in seconds since the step began.
        used_bytes: how much is in use from then on.
        limit_bytes: how much there is; None where that is not known.
    """

    rank: int
    times_s: tuple[float, ...]
    used_bytes: tuple[float, ...]
    limit_bytes: int | None = None

    @property
    def peak_bytes(self) -> float:
        """Most that is in use at a time."""
        return max(self.used_bytes, default=0.0)


@dataclass(frozen=True, slots=True)
class PathSegment:
    """A part of the critical path, and when it held up the step.

    Attributes:
        item: the span or the transfer.
        start_s: when the part before it was over, or when it started itself, if later.
        end_s: when it ended.
    """

    item: Span | Transfer
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """One optimizer step on all ranks, on one clock.

    Or some of them that overlap, where the pipeline does not drain: of every rank its windows of
    some mini-batches in a row, whose forwards and messages may be of mini-batches that go backward
    later.

    The step begins with the first span of any rank and ends with the last. All times are seconds
    since its beginning, on the clock of rank 0.

    Attributes:
        source: ``"measured"``, ``"emulated"`` (measured on emulated devices, in their seconds) or
            ``"predicted"``.
        step_s: seconds that the step takes.
        devices: device of the plan that each rank is.
        schedule: name of the schedule.
        stages: the stages in order.
        spans: what the ranks did; those of one rank do not overlap.
        step: optimizer steps done before this one; None when predicted.
        transfers: what was on its way meanwhile.
        critical_path: the spans and transfers that the end of the step waited for, in order; empty
            where it is not known. Exact where predicted; of a measured step it is inferred
            (:func:`lightning_gpp.simulate.timeline.measured_path`).
        memory: of the ranks where it is known.
        name: what it is called where several of one source are shown.
        num_minibatches: mini-batches that overlap, each a step of its own, where the pipeline does
            not drain between them; they are the micro-batches of the spans.
        weights: name of the policy of weights, where it does not drain and that is known.
    """

    source: str
    step_s: float
    devices: tuple[int, ...]
    schedule: str
    stages: tuple[TimelineStage, ...]
    spans: tuple[Span, ...]
    step: int | None = None
    transfers: tuple[Transfer, ...] = ()
    critical_path: tuple[Span | Transfer, ...] = ()
    memory: tuple[MemoryCurve, ...] = ()
    name: str = ""
    num_minibatches: int = 1
    weights: str = ""

    @property
    def num_ranks(self) -> int:
        """Ranks, busy or not."""
        return len(self.devices)

    @cached_property
    def _by_rank(self) -> dict[int, tuple[Span, ...]]:
        ordered = sorted(self.spans, key=lambda span: (span.start_s, span.end_s))
        return {
            rank: tuple(span for span in ordered if span.rank == rank)
            for rank in range(self.num_ranks)
        }

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """The spans of one rank in the order of time."""
        return self._by_rank[rank]

    def stages_of(self, rank: int) -> tuple[TimelineStage, ...]:
        """The stages of one rank."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    @cached_property
    def path_segments(self) -> tuple[PathSegment, ...]:
        """The critical path in the order of time, its segments one after the other.

        Parts may overlap in time (a message is on its way while its receiver receives it); each
        counts from the end of the part before it.
        """
        segments, now_s = [], 0.0
        for item in self.critical_path:
            start_s = min(max(item.start_s, now_s), item.end_s)
            segments.append(PathSegment(item, start_s, item.end_s))
            now_s = max(now_s, item.end_s)
        return tuple(segments)

    def messages(self) -> Iterator[tuple[Span, Span]]:
        """The (send, receive) spans of every message, in the order of sending.

        Messages of which one end lies outside are left out.
        """
        received = {}
        for span in self.spans:
            if span.kind is SpanKind.RECEIVE:
                received[message_of(span)] = span
        for span in sorted(self.spans, key=lambda span: span.start_s):
            if span.kind is SpanKind.SEND and message_of(span) in received:
                yield span, received[message_of(span)]


def message_of(span: Span) -> tuple[int, tuple[int, int, bool, int]]:
    """Identity of the message that a send, its receive or the wait for it belongs to."""
    return span.minibatch, span.parsed.message
