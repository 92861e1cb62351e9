"""When everything of a played step happened, and what let it start."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from lightning_gpp.engine.play import Played
from lightning_gpp.engine.work import Work


@dataclass(slots=True)
class WorkTrace:
    """Everything that happened, by *slots*: items, messages in the order of items, buckets of sums.

    Attributes:
        first_message: slot of the first message.
        first_sum: slot of the first bucket.
        start_s: of every slot.
        end_s: likewise.
        ready_s: when it would have started had its channels been free.
        cause: the slot whose end let it start; -1 for none.
    """

    first_message: int
    first_sum: int
    start_s: list[float]
    end_s: list[float]
    ready_s: list[float]
    cause: list[int]


def trace(work: Work, played: Played) -> WorkTrace:
    """What happened when work was played to its end."""
    return _Tracer(work, played).run()


class _Tracer:
    """State while causes are found."""

    def __init__(self, work: Work, played: Played) -> None:
        self.work, self.played = work, played
        num_items = len(work.seconds)
        self.messages = list(accumulate(map(len, work.sends), initial=num_items))
        counts = [len(one.buckets) for one in work.sums]
        self.sums = list(accumulate(counts, initial=self.messages[-1]))
        count = self.sums[-1]
        start_s = played.start_s + [0.0] * (count - num_items)
        ends_s = [start + seconds for start, seconds in zip(played.start_s, work.seconds)]
        end_s = ends_s + [0.0] * (count - num_items)
        self.found = WorkTrace(
            num_items, self.messages[-1], start_s, end_s, start_s.copy(), [-1] * count
        )
        self.arrived: list[tuple[float, int]] = [(0.0, -1)] * num_items

    def run(self) -> WorkTrace:
        """All slots."""
        self.ready_sums()
        self.ready_messages()
        self.shared()
        for line in self.work.lines:
            self.line(line)
        return self.found

    def ready_sums(self) -> None:
        """Sums are ready when all devices have begun them."""
        begun: dict[int, tuple[float, int]] = {}
        port_s, freed_by = [0.0] * self.work.num_ports, [-1] * self.work.num_ports
        start_s, seconds = self.played.start_s, self.work.seconds
        for one, first in zip(self.work.sums, self.sums):
            for slot, (fraction, sum_s) in enumerate(one.buckets, first):
                for device, last in zip(one.devices, one.last):
                    final = start_s[last] + fraction * seconds[last], last
                    begun[device] = max(begun.get(device, final), final)
                ready_s, cause = max([begun[device] for device in one.devices])
                self.found.ready_s[slot], self.found.cause[slot] = ready_s, cause
                if not one.channels:
                    begin_s = max(ready_s, port_s[one.port])
                    if begin_s > ready_s:
                        self.found.cause[slot] = freed_by[one.port]
                    port_s[one.port], freed_by[one.port] = begin_s + sum_s, slot
                    self.happened(slot, begin_s, sum_s, one.waiting)

    def ready_messages(self) -> None:
        """Messages are ready at the end of their senders; they leave ports one by one."""
        port_s, freed_by = [0.0] * self.work.num_ports, [-1] * self.work.num_ports
        ready_s, cause = self.found.ready_s, self.found.cause
        for line in self.work.lines:
            for item in line:
                end_s = self.found.end_s[item]
                for slot, send in enumerate(self.work.sends[item], self.messages[item]):
                    ready_s[slot], cause[slot] = end_s, item
                    target, seconds, port, channels = send
                    if channels:
                        continue
                    begin_s = end_s
                    if port_s[port] > end_s:
                        begin_s, cause[slot] = port_s[port], freed_by[port]
                    port_s[port], freed_by[port] = begin_s + seconds, slot
                    self.happened(slot, begin_s, seconds, (target,))

    def shared(self) -> None:
        """What shares channels, in the order in which it was served."""
        free_s, freed_by = [0.0] * self.work.num_channels, [-1] * self.work.num_channels
        on_channels = {}
        buckets = [
            iter([(slot, seconds) for slot, (_, seconds) in enumerate(one.buckets, first)])
            for one, first in zip(self.work.sums, self.sums)
        ]
        for is_sum, number in self.played.served:
            if is_sum:
                slot, seconds = next(buckets[number])
                channels, waiting = self.work.sums[number].channels, self.work.sums[number].waiting
            else:
                if number not in on_channels:
                    sends = enumerate(self.work.sends[number], self.messages[number])
                    on_channels[number] = iter([(s, send) for s, send in sends if send[3]])
                slot, (target, seconds, _, channels) = next(on_channels[number])
                waiting = (target,)
            begin_s = self.found.ready_s[slot]
            for channel in channels:
                if free_s[channel] > begin_s:
                    begin_s, self.found.cause[slot] = free_s[channel], freed_by[channel]
            for channel in channels:
                free_s[channel], freed_by[channel] = begin_s + seconds, slot
            self.happened(slot, begin_s, seconds, waiting)

    def happened(self, slot: int, begin_s: float, seconds: float, waiting: tuple[int, ...]) -> None:
        """Notes a message or sum, and who waited for it as the last one."""
        end_s = begin_s + seconds
        self.found.start_s[slot], self.found.end_s[slot] = begin_s, end_s
        for item in waiting:
            if end_s > self.arrived[item][0]:
                self.arrived[item] = end_s, slot

    def line(self, line: list[int]) -> None:
        """An item waits for the one before it, or for what came last."""
        clock_s, before = 0.0, -1
        for item in line:
            arrived_s, slot = self.arrived[item]
            self.found.cause[item] = slot if arrived_s > clock_s else before
            clock_s, before = self.found.end_s[item], item
