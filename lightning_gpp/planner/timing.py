"""How long a step of a stage graph takes, by playing the static orders of its stages.

The same events as the dry run of the program (:mod:`lightning_gpp.schedule.dry_run`), without
making the program: every stage is on devices of its own and its replicas act at the same time, so
that one stage is one line of time. A search can afford thousands of stages and micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_gpp.graph import FEED


@dataclass(frozen=True, slots=True)
class Messages:
    """The messages of an edge in one direction.

    Attributes:
        per_source: messages that one micro-batch of the sender makes.
        per_target: messages that one micro-batch of the receiver needs.
        message_s: seconds of one of them.
    """

    per_source: int
    per_target: int
    message_s: float

    @property
    def sent_s(self) -> float:
        """Seconds of what one micro-batch of the sender makes."""
        return self.per_source * self.message_s

    @property
    def received_s(self) -> float:
        """Seconds of what one micro-batch of the receiver needs."""
        return self.per_target * self.message_s


@dataclass(frozen=True, slots=True)
class TimedStage:
    """A stage as a line of time.

    Attributes:
        steps: its forwards and backwards (see :data:`lightning_gpp.schedule.orders.Steps`).
        forward_s: seconds of a forward.
        backward_s: seconds of a backward.
        end_s: seconds after its last step (the sum of the replicas' gradients).
    """

    steps: Sequence[int]
    forward_s: float
    backward_s: float
    end_s: float = 0.0


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


@dataclass(slots=True)
class _Line:
    """State of a stage: its clock, its place in the order, and where its messages arrive.

    ``starts`` notes when its steps start, where somebody wants to know.

    ``inputs`` and ``returns`` are (arrival times so far, messages per micro-batch) of what it
    receives; ``outputs`` and ``gradients`` (arrival times so far, messages, receiver) of what it
    sends.
    """

    clock_s: float = 0.0
    sent_s: float = 0.0
    position: int = 0
    is_waiting: bool = False
    starts: list[float] | None = None
    inputs: list[tuple[list[float], int]] = field(default_factory=list)
    returns: list[tuple[list[float], int]] = field(default_factory=list)
    outputs: list[tuple[list[float], Messages, int]] = field(default_factory=list)
    gradients: list[tuple[list[float], Messages, int]] = field(default_factory=list)


def play(
    stages: Sequence[TimedStage],
    forward: Mapping[tuple[int, int], Messages],
    backward: Mapping[tuple[int, int], Messages],
    num_feeds: int,
    *,
    record: bool = False,
) -> Timing:
    """Plays the orders of all stages.

    Args:
        stages: the stages.
        forward: (source, target) -> messages with activations; the feed is a source.
        backward: (source, target) of the edge -> messages with gradients, where they flow.
        num_feeds: micro-batches of the feed, which all leave at the start, one after the other.
        record: whether to note when each step starts.

    Raises:
        ValueError: stages wait for each other for ever.
    """
    lines = [_Line(starts=[] if record else None) for _ in stages]
    _connect(lines, forward, backward, num_feeds)
    runnable = list(range(len(stages)))
    while runnable:
        stage = runnable.pop()
        _advance(stage, stages[stage], lines, runnable)
    if stuck := [s for s, line in enumerate(lines) if line.position < len(stages[s].steps)]:
        raise ValueError(f"stages {stuck} wait for each other: the orders deadlock")
    ends = tuple(line.clock_s + stage.end_s for line, stage in zip(lines, stages, strict=True))
    starts = tuple(tuple(line.starts) for line in lines if line.starts is not None)
    return Timing(max(ends), ends, starts)


def _connect(
    lines: list[_Line],
    forward: Mapping[tuple[int, int], Messages],
    backward: Mapping[tuple[int, int], Messages],
    num_feeds: int,
) -> None:
    feeds: list[tuple[list[float], Messages]] = []
    for (source, target), messages in forward.items():
        arrivals: list[float] = []
        lines[target].inputs.append((arrivals, messages.per_target))
        if source == FEED:
            feeds.append((arrivals, messages))
        else:
            lines[source].outputs.append((arrivals, messages, target))
    for (source, target), messages in backward.items():
        arrivals = []
        lines[source].returns.append((arrivals, messages.per_target))
        lines[target].gradients.append((arrivals, messages, source))
    now_s = 0.0
    for _ in range(num_feeds):
        for arrivals, messages in feeds:
            for _ in range(messages.per_source):
                now_s += messages.message_s
                arrivals.append(now_s)


def _advance(stage: int, timed: TimedStage, lines: list[_Line], runnable: list[int]) -> None:
    """Runs a stage until it has to wait."""
    line = lines[stage]
    steps, forward_s, backward_s = timed.steps, timed.forward_s, timed.backward_s
    clock_s, sent_s = line.clock_s, line.sent_s
    for position in range(line.position, len(steps)):
        step = steps[position]
        is_forward = step >= 0
        microbatch = step if is_forward else ~step
        for arrivals, per_target in line.inputs if is_forward else line.returns:
            last = (microbatch + 1) * per_target - 1
            if last >= len(arrivals):
                line.is_waiting = True
                break
            if arrivals[last] > clock_s:
                clock_s = arrivals[last]
        else:
            if line.starts is not None:
                line.starts.append(clock_s)
            clock_s += forward_s if is_forward else backward_s
            for arrivals, messages, other in line.outputs if is_forward else line.gradients:
                sent_s = max(sent_s, clock_s)
                for _ in range(messages.per_source):
                    sent_s += messages.message_s
                    arrivals.append(sent_s)
                if lines[other].is_waiting:
                    lines[other].is_waiting = False
                    runnable.append(other)
            continue
        line.position = position
        break
    else:
        line.position = len(steps)
    line.clock_s, line.sent_s = clock_s, sent_s
