"""How long a step of a stage graph takes, by playing the static orders of its stages.

The same events as the dry run of the program (:mod:`lightning_gpp.schedule.dry_run`), without
making the program: every stage is on devices of its own and its replicas act at the same time, so
that one stage is one line of time. A search can afford thousands of stages and micro-batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_gpp.graph import FEED
from lightning_gpp.schedule import Steps


class Messages(NamedTuple):
    """The messages of an edge in one direction.

    Attributes:
        per_source: messages that one micro-batch of the sender makes.
        per_target: messages that one micro-batch of the receiver needs.
        message_s: seconds of one of them.
    """

    per_source: int
    per_target: int
    message_s: float


class TimedStage(NamedTuple):
    """A stage as a line of time.

    Attributes:
        num_microbatches: its micro-batches in a mini-batch.
        forward_s: seconds of a forward.
        backward_s: seconds of a backward.
        end_s: seconds after its last step (the sum of the replicas' gradients).
    """

    num_microbatches: int
    forward_s: float
    backward_s: float
    end_s: float = 0.0

    @property
    def work_s(self) -> float:
        """Seconds of all its forwards and backwards."""
        return self.num_microbatches * (self.forward_s + self.backward_s)


@dataclass(frozen=True, slots=True)
class Timing:
    """What playing the orders gave.

    Attributes:
        step_s: seconds until everything is done.
        end_s: when every stage is done.
        start_s: when every step of every stage starts; empty where that was not recorded.
    """

    step_s: float
    end_s: tuple[float, ...]
    start_s: tuple[tuple[float, ...], ...] = ()


_Sends = tuple[list[float], float, Messages | None]
"""When each micro-batch of the receiver has all it needs, seconds of a message, and all about the
messages where there is not one for each micro-batch at both ends."""


@dataclass(slots=True)
class _Ports:
    """What a stage waits for, and what it sends.

    Attributes:
        inputs: edge by edge, when all that a forward needs has arrived; infinite until then.
        returns: the same of the gradients that a backward needs.
        outputs: edge by edge, what follows a forward.
        gradients: the same of a backward.
    """

    inputs: list[list[float]] = field(default_factory=list)
    returns: list[list[float]] = field(default_factory=list)
    outputs: list[_Sends] = field(default_factory=list)
    gradients: list[_Sends] = field(default_factory=list)


def play(
    stages: Sequence[TimedStage],
    orders: Sequence[Steps],
    forward: Mapping[tuple[int, int], Messages],
    backward: Mapping[tuple[int, int], Messages],
    num_feeds: int,
    *,
    record: bool = False,
) -> Timing:
    """Plays the orders of all stages.

    Every stage goes on until it has to wait, again and again. The stages are visited from the last
    to the first, but once at the start in their order: so a visit finds both the gradient and, in
    time, the input of a steady pipeline.

    Args:
        stages: the stages.
        orders: the forwards and backwards of every stage.
        forward: (source, target) -> messages with activations; the feed is a source.
        backward: (source, target) of the edge -> messages with gradients, where they flow.
        num_feeds: micro-batches of the feed, which all leave at the start, one after the other.
        record: whether to note when each step starts.

    Raises:
        ValueError: stages wait for each other for ever.
    """
    ports = _connect(stages, forward, backward, num_feeds)
    starts: list[list[float]] | None = [[] for _ in stages] if record else None
    ends = [0.0] * len(stages)
    lines = [
        _line(number, stage, steps, ports[number], ends, None if starts is None else starts[number])
        for number, (stage, steps) in enumerate(zip(stages, orders, strict=True))
    ]
    waiting: list[int | None] = [next(line, None) for line in lines]
    lines.reverse()
    waiting.reverse()
    while any(step is not None for step in waiting):
        before, waiting = waiting, [next(line, None) for line in lines]
        if waiting == before:
            stuck = [s for s, step in enumerate(reversed(waiting)) if step is not None]
            raise ValueError(f"stages {stuck} wait for each other: the orders deadlock")
    return Timing(max(ends), tuple(ends), tuple(map(tuple, starts or ())))


def _line(
    number: int,
    stage: TimedStage,
    steps: Steps,
    ports: _Ports,
    ends: list[float],
    starts: list[float] | None,
) -> Iterator[int]:
    """The steps of a stage; halts, with the step, where it has to wait."""
    inputs, outputs = ports.inputs, ports.outputs
    returns, gradients = ports.returns, ports.gradients
    forward_s, backward_s = stage.forward_s, stage.backward_s
    clock_s = sent_s = 0.0
    never = math.inf
    for step in steps:
        if step >= 0:
            microbatch, awaited = step, inputs
            taken_s, sends = forward_s, outputs
        else:
            microbatch, awaited = ~step, returns
            taken_s, sends = backward_s, gradients
        for arrivals in awaited:
            while (at_s := arrivals[microbatch]) == never:
                yield step
            if at_s > clock_s:
                clock_s = at_s
        if starts is not None:
            starts.append(clock_s)
        clock_s += taken_s
        if sent_s < clock_s:
            sent_s = clock_s
        for arrivals, message_s, several in sends:
            if several is None:
                arrivals[microbatch] = sent_s = sent_s + message_s
            else:
                sent_s = _send(several, microbatch, arrivals, sent_s)
    ends[number] = clock_s + stage.end_s


def _send(messages: Messages, microbatch: int, arrivals: list[float], now_s: float) -> float:
    """Sends what a micro-batch makes, message by message; when the last has left."""
    sent = microbatch * messages.per_source
    for number in range(sent + 1, sent + messages.per_source + 1):
        now_s += messages.message_s
        if not number % messages.per_target:
            arrivals[number // messages.per_target - 1] = now_s
    return now_s


def _connect(
    stages: Sequence[TimedStage],
    forward: Mapping[tuple[int, int], Messages],
    backward: Mapping[tuple[int, int], Messages],
    num_feeds: int,
) -> list[_Ports]:
    ports = [_Ports() for _ in stages]
    feeds = []
    for (source, target), messages in forward.items():
        arrivals = [math.inf] * stages[target].num_microbatches
        ports[target].inputs.append(arrivals)
        if source == FEED:
            feeds.append((arrivals, messages))
        else:
            ports[source].outputs.append(_sends(arrivals, messages))
    for (source, target), messages in backward.items():
        arrivals = [math.inf] * stages[source].num_microbatches
        ports[source].returns.append(arrivals)
        ports[target].gradients.append(_sends(arrivals, messages))
    _feed(feeds, num_feeds)
    return ports


def _feed(feeds: Sequence[tuple[list[float], Messages]], num_feeds: int) -> None:
    """Sends all micro-batches of the feed, for each of them message by message, edge by edge."""
    each_s = [m.message_s for _, m in feeds for _ in range(m.per_source)]
    left_s = list(itertools.accumulate(each_s * num_feeds))
    first = 0
    for arrivals, messages in feeds:
        numbers = range(first, first + messages.per_source)
        own = sorted(itertools.chain.from_iterable(left_s[n :: len(each_s)] for n in numbers))
        complete = own[messages.per_target - 1 :: messages.per_target]
        arrivals[: len(complete)] = complete
        first = numbers.stop


def _sends(arrivals: list[float], messages: Messages) -> _Sends:
    is_one = messages.per_source == messages.per_target == 1
    return arrivals, messages.message_s, None if is_one else messages
