"""When everything in a played step happened, and what each event waited for."""

from __future__ import annotations

from itertools import accumulate

from lightning_gpp.engine.play import Played
from lightning_gpp.engine.work import Work


class WorkTrace:
    """Times and causes of a step's events, by *slots*: items, messages, buckets of all-reduces.

    Args:
        work: the step; it was played to its end.
        played: the result of playing it.

    Attributes:
        start_s: of every slot.
        end_s: likewise.
        ready_s: when it would have started with free channels.
        cause: slot whose end it waited for; -1 if none.
    """

    def __init__(self, work: Work, played: Played) -> None:
        self._work, self._played = work, played
        num_items = len(work.seconds)
        self._messages = list(accumulate(map(len, work.sends), initial=num_items))
        buckets = (len(one.buckets) for one in work.sums)
        self._sums = list(accumulate(buckets, initial=self._messages[-1]))
        others = [0.0] * (self._sums[-1] - num_items)
        self.start_s = played.start_s + others
        ends_s = [start + seconds for start, seconds in zip(played.start_s, work.seconds)]
        self.end_s = ends_s + others
        self.ready_s, self.cause = self.start_s.copy(), [-1] * len(self.start_s)
        self._arrived: list[tuple[float, int]] = [(0.0, -1)] * num_items
        self._ready_sums()
        self._ready_messages()
        self._shared()
        for line in work.lines:
            clock_s, before = 0.0, -1
            for item in line:  # it waits for the one before it, or for what came last
                arrived_s, slot = self._arrived[item]
                self.cause[item] = slot if arrived_s > clock_s else before
                clock_s, before = self.end_s[item], item

    def _ready_sums(self) -> None:
        """Sums are ready when all devices have begun them."""
        begun: dict[int, tuple[float, int]] = {}
        port_s, freed_by = [0.0] * self._work.num_ports, [-1] * self._work.num_ports
        start_s, seconds = self._played.start_s, self._work.seconds
        for one, first in zip(self._work.sums, self._sums):
            for slot, (fraction, sum_s) in enumerate(one.buckets, first):
                for device, last in zip(one.devices, one.last):
                    final = start_s[last] + fraction * seconds[last], last
                    begun[device] = max(begun.get(device, final), final)
                ready_s, cause = max([begun[device] for device in one.devices])
                self.ready_s[slot], self.cause[slot] = ready_s, cause
                if not one.channels:
                    ports = (one.port,)
                    self._happened(slot, sum_s, ports, port_s, freed_by, one.waiting)

    def _ready_messages(self) -> None:
        """Messages are ready at the end of their senders; they leave ports one by one."""
        port_s, freed_by = [0.0] * self._work.num_ports, [-1] * self._work.num_ports
        for line in self._work.lines:
            for item in line:
                sends = self._work.sends[item]
                for slot, (target, how) in enumerate(sends, self._messages[item]):
                    seconds, port, channels = self._work.hows[how]
                    self.ready_s[slot], self.cause[slot] = self.end_s[item], item
                    if not channels:
                        self._happened(slot, seconds, (port,), port_s, freed_by, (target,))

    def _shared(self) -> None:
        """What shares channels, in the order in which it was served."""
        free_s, freed_by = [0.0] * self._work.num_channels, [-1] * self._work.num_channels
        hows = self._work.hows
        buckets = [
            iter([(slot, seconds) for slot, (_, seconds) in enumerate(one.buckets, first)])
            for one, first in zip(self._work.sums, self._sums)
        ]
        on_channels = {
            item: iter([(s, send) for s, send in enumerate(sends, first) if hows[send[1]][2]])
            for item, (sends, first) in enumerate(zip(self._work.sends, self._messages))
        }
        for is_sum, number in self._played.served:
            if is_sum:
                slot, seconds = next(buckets[number])
                one = self._work.sums[number]
                self._happened(slot, seconds, one.channels, free_s, freed_by, one.waiting)
            else:
                slot, (target, how) = next(on_channels[number])
                seconds, _, channels = hows[how]
                self._happened(slot, seconds, channels, free_s, freed_by, (target,))

    def _happened(
        self,
        slot: int,
        seconds: float,
        places: tuple[int, ...],
        free_s: list[float],
        freed_by: list[int],
        waiting: tuple[int, ...],
    ) -> None:
        """A message or a sum takes its ports or channels, and who waited for it as the last one."""
        begin_s = self.ready_s[slot]
        for place in places:
            if free_s[place] > begin_s:
                begin_s, self.cause[slot] = free_s[place], freed_by[place]
        end_s = begin_s + seconds
        for place in places:
            free_s[place], freed_by[place] = end_s, slot
        self.start_s[slot], self.end_s[slot] = begin_s, end_s
        for item in waiting:
            if end_s > self._arrived[item][0]:
                self._arrived[item] = end_s, slot
