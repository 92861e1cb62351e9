"""What recorded steps of a program took, action by action.

Of several steps those count that took about the median; of these steps the mean of every quantity,
not its median: what adds up to a step has to do so after it was averaged, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from lightning_gpp.graph import FEED
from lightning_gpp.schedule import Action, Program
from lightning_gpp.simulate.timeline.span import Span, SpanKind
from lightning_gpp.simulate.timeline.timeline import Timeline


class Message(NamedTuple):
    """A message as it was recorded.

    Attributes:
        source: device that sent it.
        target: device that received it.
        size_bytes: of its tensors.
        send_s: what it took the sender.
        sent_s: when the sender was done with it.
        asked_s: when the receiver asked for it.
        received_s: when the receiver had it.
    """

    source: int
    target: int
    size_bytes: float
    send_s: float
    sent_s: float
    asked_s: float
    received_s: float


@dataclass(frozen=True)
class Recorded:
    """Recorded steps of one program.

    Attributes:
        timelines: of the steps, at least one.
        program: what they ran.
    """

    timelines: Sequence[Timeline]
    program: Program

    def typical(self, values: Callable[[Timeline], Sequence[float]]) -> float:
        """The mean over the steps of the mean in a step; 0 where nothing was recorded."""
        means = [statistics.fmean(found) for t in self.timelines if (found := values(t))]
        return statistics.fmean(means) if means else 0.0

    def action_s(self, stage: int | None, kind: SpanKind) -> float:
        """Seconds of the spans of one kind of a stage, once per micro-batch."""
        return self.typical(
            lambda timeline: [
                span.duration_s
                for span in timeline.spans
                if span.kind is kind and span.stage == stage
            ]
        )

    def optimizer_s(self, device: int) -> float | None:
        """Seconds of the optimizer on a device, once per step; None where there is none."""
        found = [
            [s.duration_s for s in _of_device(t, device) if s.kind is SpanKind.OPTIMIZER]
            for t in self.timelines
        ]
        return statistics.fmean(map(sum, found)) if any(found) else None

    def prepare_s(self) -> float:
        """Seconds from the mini-batch to the first action, on the device of the feed."""

        def seconds(timeline: Timeline) -> list[float]:
            spans = _of_device(timeline, self.program.device(FEED))
            read = [s.end_s for s in spans if s.kind is SpanKind.DATA]
            begun = [s.start_s for s in spans if s.kind is SpanKind.PREPARE]
            firsts = [s.start_s for s in spans if s.action is not None]
            return [first - start for first, start in zip(firsts[:1], (read or begun)[:1])]

        return self.typical(seconds)

    def finish_s(self, device: int) -> float | None:
        """Seconds from the end of a device's actions, and of those of the loss's, to its optimizer.

        None where it has no optimizer.
        """
        found = []
        for timeline in self.timelines:
            both = [_of_device(timeline, d) for d in (device, self.program.device(FEED))]
            starts = [s.start_s for s in both[0] if s.kind is SpanKind.OPTIMIZER]
            ends = [s.end_s for spans in both for s in spans if s.action is not None]
            found += [max(0.0, start - max(ends, default=0.0)) for start in starts[:1]]
        return statistics.fmean(found) if found else None

    def gap_s(self, *, is_turn: bool) -> float:
        """Seconds between two actions of a device.

        Args:
            is_turn: those around the user's step where it runs once, on the device of the loss;
                otherwise those that it is not between.
        """

        def gaps(timeline: Timeline) -> list[float]:
            loss_rank = timeline.devices.index(self.program.device(FEED))
            pairs = self._pairs(timeline, is_turn=is_turn)
            return [
                after.start_s - before.end_s
                for before, after in pairs
                if not is_turn or before.rank == loss_rank
            ]

        return self.typical(gaps)

    def _pairs(self, timeline: Timeline, *, is_turn: bool) -> Iterator[tuple[Span, Span]]:
        """Spans of actions that follow each other; those with the user's step between, or not."""
        has_turn = any(s.kind is SpanKind.LOSS and s.action is None for s in timeline.spans)
        for rank, spans in enumerate(timeline_actions(timeline)):
            _, second_part = self.program.around_turn(timeline.devices[rank])
            first = str(second_part[0]) if has_turn and second_part else None
            for before, after in zip(spans, spans[1:]):
                follows = before.action != after.action and before.minibatch == after.minibatch
                if follows and (after.action == first) is is_turn:
                    yield before, after

    def messages(self) -> list[list[Message]]:
        """The messages of every step; those whose bytes were not recorded are left out."""
        return [list(_messages(timeline)) for timeline in self.timelines]

    def sums(self) -> Iterator[tuple[int, int, float]]:
        """(group, device, seconds since all devices came to it) of every sum of gradients."""
        for timeline in self.timelines:
            for span in timeline.spans:
                if span.kind is SpanKind.REDUCE and span.action is not None:
                    group = Action.parse(span.action).microbatch
                    yield group, timeline.devices[span.rank], span.duration_s


def typical_steps(timelines: Sequence[Timeline]) -> list[Timeline]:
    """The half of some steps whose seconds are nearest to their median, in their order."""
    median_s = statistics.median(timeline.step_s for timeline in timelines)
    numbers = sorted(range(len(timelines)), key=lambda i: abs(timelines[i].step_s - median_s))
    return [timelines[number] for number in sorted(numbers[: (len(timelines) + 1) // 2])]


def check_program(timeline: Timeline, program: Program) -> None:
    """Checks that a timeline is of a program.

    Raises:
        ValueError: it is not; the text names the step and the device.
    """
    what = "predicted step" if timeline.step is None else f"timeline of step {timeline.step}"
    if len(timeline.stages) != program.num_stages:
        raise ValueError(
            f"the {what} is of another program: it has {len(timeline.stages)} stages (replicas "
            f"counted), the program {program.num_stages}; take the plan that was recorded"
        )
    for device, spans in zip(timeline.devices, timeline_actions(timeline)):
        expected = [*map(str, program.before_update(device))]
        for _, found in groupby(spans, key=lambda span: span.minibatch):
            actions = [action for action, _ in groupby(found, key=lambda span: span.action)]
            if actions != expected:
                raise ValueError(
                    f"the {what} is of another program: device {device} ran other actions; take "
                    "the plan, the schedule and the number of micro-batches that were recorded"
                )


def timeline_actions(timeline: Timeline) -> list[list[Span]]:
    """Of every rank the spans that belong to actions, mini-batch by mini-batch in time."""
    return [
        sorted(
            (span for span in timeline.of_rank(rank) if span.action is not None),
            key=lambda span: span.minibatch,
        )
        for rank in range(timeline.num_ranks)
    ]


def _of_device(timeline: Timeline, device: int) -> tuple[Span, ...]:
    return timeline.of_rank(timeline.devices.index(device))


def _messages(timeline: Timeline) -> Iterator[Message]:
    asked: dict[tuple[int, str | None], float] = {}
    for span in timeline.spans:
        if span.kind in (SpanKind.WAIT, SpanKind.RECEIVE):
            key = span.minibatch, span.action
            asked[key] = min(asked.get(key, span.start_s), span.start_s)
    for sent, received in timeline.messages():
        if sent.size_bytes is not None:
            yield Message(
                timeline.devices[sent.rank],
                timeline.devices[received.rank],
                sent.size_bytes,
                sent.duration_s,
                sent.end_s,
                asked[received.minibatch, received.action],
                received.end_s,
            )
