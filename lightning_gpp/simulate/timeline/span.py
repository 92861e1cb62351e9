"""Spans of a rank's time, and transfers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from lightning_gpp.schedule import Action


class Category(Enum):
    """What a rank's time goes into; the value is its name in tables and loggers."""

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
        LOSS: the user's step after the pipelined forward. Where it runs for every micro-batch, it
            is part of the loss stage's forward action; where it runs once, it has no action and
            goes from the end of the forward half of the program to the start of its backward half.
        BACKWARD: the backward of a stage for one micro-batch.
        SEND: handing a message to the transport; the transfer itself goes on meanwhile.
        WAIT: the receiver of a message stands still because it has not been sent yet; likewise
            for a sum of gradients that not all its ranks have come to, and for the end of the
            actions of rank 0, which then tells the result, and while rank 0 runs the user's step
            between the two halves of a program.
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
        OVERHEAD: what the interpreter takes between two actions: a task of a simulation, no span.
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
    OVERHEAD = "overhead"

    @property
    def category(self) -> Category:
        """Category under which its time is counted."""
        return _CATEGORIES.get(self, Category.OTHER)


_CATEGORIES = {
    kind: category
    for category, kinds in {
        Category.FORWARD: (SpanKind.FORWARD, SpanKind.FEED, SpanKind.LOSS),
        Category.BACKWARD: (SpanKind.BACKWARD,),
        Category.COMMUNICATION: (SpanKind.SEND, SpanKind.RECEIVE, SpanKind.REDUCE, SpanKind.FLUSH),
        Category.WAIT: (SpanKind.WAIT,),
    }.items()
    for kind in kinds
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
        minibatch: which mini-batch of the step, where gradients are accumulated over several; of
            mini-batches that overlap only of what is no action, whose micro-batch it is.
        updates: of the stage's parameters before it, where the pipeline does not drain between
            mini-batches; a forward and its backward then see different numbers of them.

    Raises:
        ValueError: it ends before it starts.
    """

    rank: int
    kind: SpanKind
    start_s: float
    end_s: float
    action: str | None = None
    size_bytes: int | None = None
    minibatch: int = 0
    updates: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start_s <= self.end_s:
            raise ValueError(f"span {self.name} goes from {self.start_s} s to {self.end_s} s")

    @property
    def parsed(self) -> Action:
        """The action that it is, or is a part of; only of spans that have one."""
        assert self.action is not None
        return _parsed(self.action)

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
        return None if self.action is None else self.parsed.stage

    @property
    def microbatch(self) -> int | None:
        """Micro-batch of a compute action, index of a message on its edge, or of a reduce group."""
        return None if self.action is None else self.parsed.microbatch


@lru_cache(maxsize=100_000)
def _parsed(text: str) -> Action:
    """The action of a text; pictures ask for those of a step many times."""
    return Action.parse(text)


class TransferKind(Enum):
    """What is transferred.

    Attributes:
        MESSAGE: what one stage sends to another.
        SUM: gradients that several ranks add up.
    """

    MESSAGE = "message"
    SUM = "sum"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Something that occupies channels, and no rank.

    Of a measured step it is known when a message was handed over and when its receiver had it: the
    transfer lasts from the one to the other, although it may have arrived before it was asked for.

    Attributes:
        kind: what.
        start_s: seconds since the step began.
        end_s: likewise; not before ``start_s``.
        channels: names of what it occupies; of a measured step the two ranks (``"rank 0 → 1"``).
        ranks: from where to where; all ranks of a sum.
        action: text form of the action that sends it (``"2SF0>3"``), or that waits for the sum.
        size_bytes: where known.
        minibatch: which mini-batch of the step.
        waited_s: seconds that it waited for an occupied channel; known where predicted.
    """

    kind: TransferKind
    start_s: float
    end_s: float
    channels: tuple[str, ...]
    ranks: tuple[int, ...]
    action: str | None = None
    size_bytes: int | None = None
    minibatch: int = 0
    waited_s: float = 0.0

    @property
    def name(self) -> str:
        """The action, or what else it is (``"copy"``)."""
        return self.action if self.action is not None else self.kind.value

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


def transfer_lanes(transfers: Iterable[Transfer]) -> dict[str, list[Transfer]]:
    """Every channel as a lane, or as several where its transfers overlap.

    >>> first = Transfer(TransferKind.MESSAGE, 0.0, 2.0, ("a out",), (0, 1))
    >>> second = Transfer(TransferKind.MESSAGE, 1.0, 3.0, ("a out", "bus"), (0, 1))
    >>> [(name, one.start_s) for name, (one,) in transfer_lanes([first, second]).items()]
    [('a out', 0.0), ('a out (2)', 1.0), ('bus', 1.0)]
    """
    lanes: dict[tuple[str, int], list[Transfer]] = {}
    for one in sorted(transfers, key=lambda one: (one.start_s, one.end_s)):
        for channel in one.channels:
            number = 1
            while (lane := lanes.setdefault((channel, number), [])) and (
                lane[-1].end_s > one.start_s
            ):
                number += 1
            lane.append(one)
    return {
        channel if number == 1 else f"{channel} ({number})": lane
        for (channel, number), lane in sorted(lanes.items(), key=lambda each: _natural(*each[0]))
    }


def _natural(name: str, number: int) -> tuple[list[tuple[int, str]], int]:
    """Sorts ``gpu2`` before ``gpu10``."""
    words = re.split(r"(\d+)", name)
    return [(int(word), "") if word.isdigit() else (-1, word) for word in words], number
