"""What every rank did in one optimizer step, and when: measured or predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from lightning_gpp.schedule import Action
from lightning_gpp.strict_json import JsonFormat

FORMAT = JsonFormat("lightning_gpp.timeline", 1)


class Category(Enum):
    """What a rank's time went into; the value is its name in tables and loggers."""

    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    WAIT = "wait"
    OTHER = "other"

    @property
    def is_compute(self) -> bool:
        """Whether compute actions of the program run."""
        return self in (Category.FORWARD, Category.BACKWARD)


class SpanKind(Enum):
    """What a rank does in a span.

    Attributes:
        FORWARD: the forward of a stage for one micro-batch.
        FEED: the user's step up to the pipelined forward (on the rank of the loss).
        LOSS: the user's step after the pipelined forward; part of the loss stage's forward action.
        BACKWARD: the backward of a stage for one micro-batch.
        SEND: handing a message to the transport; the transfer itself goes on meanwhile.
        WAIT: the receiver of a message stands still because it has not been sent yet; likewise
            for a sum of gradients that not all its ranks have come to, and for the end of the
            actions of rank 0, which then tells the result.
        RECEIVE: the rest of a receive: from when the message was sent until it is here. Short
            when it was here before it was asked for.
        REDUCE: summing gradients of shared parameters with other ranks.
        FLUSH: after the last action, until everything sent has left.
        DATA: reading the mini-batch from the user's data loader.
        PREPARE: from then to the first action: the user's hooks, cutting it into micro-batches.
        FINISH: after the last action and its messages, up to the optimizer: joining the results of
            the micro-batches and telling them to all ranks, handing gradients out.
        OPTIMIZER: gradient clipping and the optimizer's step.
        VALIDATION: a validation in the middle of the step (accumulated gradients).
    """

    FORWARD = "forward"
    FEED = "feed"
    LOSS = "loss"
    BACKWARD = "backward"
    SEND = "send"
    RECEIVE = "receive"
    REDUCE = "reduce"
    FLUSH = "flush"
    WAIT = "wait"
    DATA = "data"
    PREPARE = "prepare"
    FINISH = "finish"
    OPTIMIZER = "optimizer"
    VALIDATION = "validation"

    @property
    def category(self) -> Category:
        """Where its time is counted."""
        return _CATEGORIES[self]


_CATEGORIES = {
    SpanKind.FORWARD: Category.FORWARD,
    SpanKind.FEED: Category.FORWARD,
    SpanKind.LOSS: Category.FORWARD,
    SpanKind.BACKWARD: Category.BACKWARD,
    SpanKind.SEND: Category.COMMUNICATION,
    SpanKind.RECEIVE: Category.COMMUNICATION,
    SpanKind.REDUCE: Category.COMMUNICATION,
    SpanKind.FLUSH: Category.COMMUNICATION,
    SpanKind.WAIT: Category.WAIT,
    SpanKind.DATA: Category.OTHER,
    SpanKind.PREPARE: Category.OTHER,
    SpanKind.FINISH: Category.OTHER,
    SpanKind.OPTIMIZER: Category.OTHER,
    SpanKind.VALIDATION: Category.OTHER,
}


@dataclass(frozen=True, slots=True)
class Span:
    """Something that one rank did without interruption.

    Attributes:
        rank: who.
        kind: what.
        start_s: seconds since the step began.
        end_s: likewise; not before ``start_s``.
        action: text form of the program's action that it is, or is a part of (``"2F0"``); None
            outside of the program.
        size_bytes: of the message, where known.
        minibatch: which mini-batch of the step, where gradients are accumulated over several.

    Raises:
        ValueError: it ends before it starts, or ``action`` is no action.
    """

    rank: int
    kind: SpanKind
    start_s: float
    end_s: float
    action: str | None = None
    size_bytes: int | None = None
    minibatch: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.start_s <= self.end_s:
            raise ValueError(f"span {self.name} goes from {self.start_s} s to {self.end_s} s")
        if self.action is not None:
            Action.parse(self.action)

    @property
    def name(self) -> str:
        """The action, or what else it is (``"optimizer"``)."""
        return self.action if self.action is not None else self.kind.value

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s

    @property
    def stage(self) -> int | None:
        """The stage that acts; -1 for the feed, None outside of the program."""
        return None if self.action is None else Action.parse(self.action).stage

    @property
    def microbatch(self) -> int | None:
        """Micro-batch of a compute action, index of a message on its edge, or of a reduce group."""
        return None if self.action is None else Action.parse(self.action).microbatch

    @property
    def peer(self) -> int | None:
        """The other stage of a message."""
        return None if self.action is None else Action.parse(self.action).peer


@dataclass(frozen=True, slots=True)
class TimelineStage:
    """A stage, as far as a timeline shows it.

    Attributes:
        id: of the stage.
        rank: where it runs.
        label: a short text for its operators.
        operators: their names.
    """

    id: int
    rank: int
    label: str = ""
    operators: tuple[str, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """One optimizer step on all ranks, on one clock.

    The step begins with the first span of any rank and ends with the last. All times are seconds
    since its beginning, on the clock of rank 0.

    Attributes:
        source: ``"measured"`` or ``"predicted"``.
        step_s: seconds that the step takes.
        devices: device of the plan that each rank is.
        schedule: name of the schedule.
        stages: the stages in order.
        spans: what the ranks did; those of one rank do not overlap.
        step: optimizer steps done before this one; None when predicted.
        clock_error_s: for each rank by how much its times may be off against those of rank 0
            (zero for ranks that share a clock).

    Raises:
        ValueError: a span names an unknown rank or stage, goes beyond the step, or overlaps
            another one of its rank.
    """

    source: str
    step_s: float
    devices: tuple[int, ...]
    schedule: str
    stages: tuple[TimelineStage, ...]
    spans: tuple[Span, ...]
    step: int | None = None
    clock_error_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for span in self.spans:
            if not 0 <= span.rank < self.num_ranks:
                raise ValueError(f"span {span.name} is on rank {span.rank} of {self.num_ranks}")
            if span.end_s > self.step_s:
                raise ValueError(
                    f"span {span.name} of rank {span.rank} ends at {span.end_s} s, after the step "
                    f"({self.step_s} s)"
                )
            if span.stage is not None and not -1 <= span.stage < len(self.stages):
                raise ValueError(f"span {span.name} is of an unknown stage")
        for rank in range(self.num_ranks):
            spans = self.of_rank(rank)
            for first, second in zip(spans, spans[1:]):
                if second.start_s < first.end_s:
                    raise ValueError(f"rank {rank}: {second.name} starts before {first.name} ends")

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

    def messages(self) -> Iterator[tuple[Span, Span]]:
        """The (send, receive) spans of every message, in the order of sending."""
        received = {}
        for span in self.spans:
            if span.kind is SpanKind.RECEIVE:
                received[_message(span)] = span
        for span in sorted(self.spans, key=lambda span: span.start_s):
            if span.kind is SpanKind.SEND:
                yield span, received[_message(span)]

    def to_json(self) -> str:
        """The versioned JSON form."""
        return FORMAT.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Reads :meth:`to_json`'s form.

        Raises:
            ValueError: it is not a timeline, or one of another version.
        """
        return FORMAT.loads(cls, text)


def _message(span: Span) -> tuple[int, tuple[int, int, bool, int]]:
    assert span.action is not None
    return span.minibatch, Action.parse(span.action).message
