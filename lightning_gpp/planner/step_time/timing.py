"""How long a step takes, by playing the static orders of its devices.

The same events as the simulation of the program (:mod:`lightning_gpp.simulate.engine`), without
making the program: numbered forwards and backwards in the order of every device, messages, and the
sums of gradients behind them. A search can afford it for thousands of stages and micro-batches.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_gpp.planner.step_time.least_step import ROUNDING
from lightning_gpp.planner.step_time.shares import EdgeMessages

Send = tuple[int, float, tuple[int, ...]]
"""A message: the work that waits for it, its seconds, and the channels that it occupies; without
channels it goes through the port of its device alone."""


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum of the gradients of some replicas.

    Attributes:
        stage: whose replicas they are.
        last: the work of every replica in which the gradients become final.
        at_once: those of them that are no backwards of the stage: all is final when they begin.
        devices: of every replica, where other stages have sums, too: a device begins the buckets of
            its stages one after the other, those of later stages first.
        buckets: seconds from the start of a last backward until a bucket is final, and the seconds
            of its sum, in the order in which they begin.
        paces: of every replica, its last backward as a part of the longest one, after which the
            seconds of the buckets are; without paces all last equally long.
        channels: what the sums occupy; without channels nothing else needs theirs.
        then: the work that waits for them.
    """

    stage: int
    last: tuple[int, ...]
    buckets: Sequence[tuple[float, float]]
    channels: tuple[int, ...] = ()
    then: tuple[int, ...] = ()
    at_once: frozenset[int] = frozenset()
    devices: tuple[int, ...] = ()
    paces: tuple[float, ...] = ()

    def ready_s(self, start_s: Sequence[float]) -> list[float]:
        """When every bucket is final on all replicas.

        Args:
            start_s: of all work.
        """
        least_s = max((start_s[last] for last in self.at_once), default=0.0)
        paces = self.paces or (1.0,) * len(self.last)
        begun = [
            (start_s[last], pace)
            for last, pace in zip(self.last, paces, strict=True)
            if last not in self.at_once
        ]
        if not self.paces:  # the last to begin ends last
            begun = [max(begun)] if begun else []
        return [
            max([least_s, *(begun_s + pace * final_s for begun_s, pace in begun)])
            for final_s, _ in self.buckets
        ]


@dataclass(slots=True)
class Work:
    """All forwards and backwards of a step as numbers, and what they wait for.

    Attributes:
        seconds: what each takes.
        missing: how many messages each waits for.
        sends: what each sends when it is done, in this order.
        lines: the work of every device in its order.
        feeds: the messages of the feed, which all leave at the start, one after the other.
        sums: of gradients.
        num_channels: channels that messages and sums share.
        feed_line: the device of the feed.
    """

    seconds: list[float]
    missing: list[int]
    sends: list[tuple[Send, ...]]
    lines: list[list[int]]
    feeds: list[Send] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    num_channels: int = 0
    feed_line: int = 0

    def send(self, number: int, target: int, message_s: float, channels: tuple[int, ...]) -> None:
        """Adds a message behind those that some work sends already, and that another waits for."""
        self.missing[target] += 1
        self.sends[number] += ((target, message_s, channels),)

    def exchange(
        self,
        messages: EdgeMessages,
        sends: Sequence[tuple[float, tuple[int, ...]] | None],
        sender: int,
        receiver: int,
    ) -> None:
        """Adds the messages between two stages.

        Args:
            messages: the messages.
            sends: seconds and channels of every kind of them; None where there is nothing to send.
            sender: the number of the first work that sends.
            receiver: likewise of what receives.
        """
        if not any(sends):
            return
        missing, found = self.missing, self.sends
        for own, other, kind in messages.each:
            if send := sends[kind]:
                target = receiver + other
                missing[target] += 1
                found[sender + own] += ((target, send[0], send[1]),)


@dataclass(frozen=True, slots=True)
class Played:
    """What playing gave.

    Attributes:
        start_s: when each forward and backward starts.
        line_s: when every device is done with its work.
        sent_s: when the last message of every device is there.
        sums_s: when every sum is done.
    """

    start_s: list[float]
    line_s: list[float]
    sent_s: list[float]
    sums_s: list[float]

    @property
    def step_s(self) -> float:
        """Seconds until everything is done."""
        return max(*self.line_s, *self.sent_s, *self.sums_s)


def play(work: Work, at_most_s: float = math.inf) -> Played | None:
    """Plays the orders of all devices; None where a device is done too late.

    A device goes on until it has to wait. Its messages leave one after the other; where they need
    channels that others use, too, they are served in the order in which they are ready (see
    :mod:`lightning_gpp.cluster.channels`).

    Args:
        work: what they do.
        at_most_s: the longest step that is of interest. Most of those that are longer are seen to
            be before their end: a device has waited longer than its work leaves time for.

    Raises:
        ValueError: devices wait for each other for ever.
    """
    try:
        return _Player(work, at_most_s).run()
    except _TooLateError:
        return None


class _TooLateError(Exception):
    """A device cannot be done in time."""


class _Player:
    """State while a step is played."""

    def __init__(self, work: Work, at_most_s: float) -> None:
        self.work = work
        most_s = at_most_s * (1 + ROUNDING)
        of = work.seconds.__getitem__
        self.spare_s = [most_s - sum(map(of, line)) for line in work.lines]
        self.start_s = [0.0] * len(work.seconds)
        self.ready_s = [0.0] * len(work.seconds)
        self.missing = list(work.missing)
        self.position = [0] * len(work.lines)
        self.line_s = [0.0] * len(work.lines)
        self.sent_s = [0.0] * len(work.lines)
        self.free_s = [0.0] * work.num_channels
        self.queue: list[tuple[float, int, int, int, float, tuple[int, ...]]] = []
        self.waiting: dict[int, int] = {}
        self.sums_s = [0.0] * len(work.sums)
        self.sums_of: dict[int, list[int]] = {}
        for number, found in enumerate(work.sums):
            for last in found.last:
                self.sums_of.setdefault(last, []).append(number)
        self.left = [len(found.last) for found in work.sums]
        self.buckets_left = [len(found.buckets) for found in work.sums]
        self.sums_begun_s = [0.0] * len(work.lines)
        self.in_turn = [n for n in reversed(range(len(work.sums))) if work.sums[n].devices]
        self.num_pushed = 0

    def run(self) -> Played:
        """Plays everything."""
        self.feed()
        runnable = list(range(len(self.work.lines)))
        while runnable or self.queue:
            if not runnable:
                runnable += self.serve()
            else:
                self.line(runnable.pop(), runnable)
        if self.waiting:
            raise ValueError(
                f"devices {sorted(self.waiting.values())} wait for each other: the orders deadlock"
            )
        return Played(self.start_s, self.line_s, self.sent_s, self.sums_s)

    def feed(self) -> None:
        """Sends all that the feed sends."""
        missing, ready_s = self.missing, self.ready_s
        now_s = 0.0
        for target, message_s, channels in self.work.feeds:
            if channels:
                self.push(0.0, self.work.feed_line, target, message_s, channels)
                continue
            now_s += message_s
            missing[target] -= 1
            if ready_s[target] < now_s:
                ready_s[target] = now_s

    def line(self, number: int, runnable: list[int]) -> None:
        """Runs a device until it has to wait."""
        work, line = self.work, self.work.lines[number]
        seconds, sends = work.seconds, work.sends
        start_s, ready_s, missing, waiting = self.start_s, self.ready_s, self.missing, self.waiting
        clock_s, sent_s = self.line_s[number], self.sent_s[number]
        spare_s = self.spare_s[number]
        sums_of = self.sums_of
        for position in range(self.position[number], len(line)):
            step = line[position]
            if missing[step]:
                waiting[step] = number
                break
            if ready_s[step] > clock_s:
                spare_s += clock_s - ready_s[step]
                if spare_s < 0.0:
                    raise _TooLateError
                clock_s = ready_s[step]
            start_s[step] = clock_s
            clock_s += seconds[step]
            if sent_s < clock_s:
                sent_s = clock_s
            for target, message_s, channels in sends[step]:
                if channels:
                    self.push(clock_s, number, target, message_s, channels)
                    continue
                sent_s += message_s
                if ready_s[target] < sent_s:
                    ready_s[target] = sent_s
                missing[target] -= 1
                if not missing[target] and target in waiting:
                    runnable.append(waiting.pop(target))
            if step in sums_of:
                for summed in sums_of[step]:
                    runnable += self.final(summed)
        else:
            position = len(line)
        self.line_s[number], self.sent_s[number], self.position[number] = clock_s, sent_s, position
        self.spare_s[number] = spare_s

    def push(
        self, now_s: float, line: int, target: int, seconds: float, channels: tuple[int, ...]
    ) -> None:
        """A message, or a sum, that has to wait for its channels."""
        self.num_pushed += 1
        heapq.heappush(self.queue, (now_s, line, self.num_pushed, target, seconds, channels))

    def serve(self) -> list[int]:
        """Serves the message or sum that is ready first; returns who waited for it."""
        ready_s, line, _, target, seconds, channels = heapq.heappop(self.queue)
        end_s = max(ready_s, *(self.free_s[channel] for channel in channels)) + seconds
        for channel in channels:
            self.free_s[channel] = end_s
        if target < 0:
            return self.summed(~target, end_s)
        self.sent_s[line] = max(self.sent_s[line], end_s)
        return self.arrived(target, end_s)

    def arrived(self, target: int, now_s: float) -> list[int]:
        """Notes that something is there; returns who waited for it."""
        self.ready_s[target] = max(self.ready_s[target], now_s)
        self.missing[target] -= 1
        if not self.missing[target] and target in self.waiting:
            return [self.waiting.pop(target)]
        return []

    def summed(self, number: int, end_s: float) -> list[int]:
        """Notes the end of a bucket; returns who waited for the last one."""
        self.sums_s[number] = end_s
        self.buckets_left[number] -= 1
        if self.buckets_left[number]:
            return []
        return [line for step in self.work.sums[number].then for line in self.arrived(step, end_s)]

    def final(self, number: int) -> list[int]:
        """A replica has begun its last backward, the last one of all: the sums follow."""
        self.left[number] -= 1
        if self.left[number]:
            return []
        found = self.work.sums[number]
        if found.devices:
            self.begin_in_turn()
            return []
        ready = found.ready_s(self.start_s)
        if found.channels:
            for ready_s, (_, sum_s) in zip(ready, found.buckets):
                self.push(ready_s, 0, ~number, sum_s, found.channels)
            return []
        end_s = 0.0
        for ready_s, (_, sum_s) in zip(ready, found.buckets):
            end_s = max(end_s, ready_s) + sum_s
        self.buckets_left[number] = 1
        return self.summed(number, end_s)

    def begin_in_turn(self) -> None:
        """Begins the sums whose gradients are final and that wait for no other on their devices."""
        blocked: set[int] = set()
        waiting = []
        for number in self.in_turn:
            found = self.work.sums[number]
            if self.left[number] or not blocked.isdisjoint(found.devices):
                blocked.update(found.devices)
                waiting.append(number)
                continue
            begun_s, paces = self.sums_begun_s, found.paces or (1.0,) * len(found.last)
            for final_s, sum_s in found.buckets:
                for device, last, pace in zip(found.devices, found.last, paces):
                    after_s = 0.0 if last in found.at_once else pace * final_s
                    ready_s = self.start_s[last] + after_s
                    begun_s[device] = max(begun_s[device], ready_s)
                ready_s = max([begun_s[device] for device in found.devices])
                self.push(ready_s, 0, ~number, sum_s, found.channels)
        self.in_turn = waiting
