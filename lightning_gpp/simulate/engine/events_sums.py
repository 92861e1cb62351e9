"""The sums of gradients while a program is played: when devices begin them, and their ends.

A device begins its buckets in their fixed order, each as soon as its gradients are final and all
before it have begun; at its first REDUCE action whatever is left begins. The sum itself is ready
when all devices of the group have begun it (``lightning_gpp.runtime.sums.reduction``).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from lightning_gpp.simulate.engine.compiled import BucketSum, Compiled
from lightning_gpp.simulate.engine.times import NEVER, Entry, Times


@dataclass(slots=True)
class _Device:
    """Where a device is in its order of buckets.

    Attributes:
        order: its buckets.
        step: the step that the rest is about.
        begun: how many have begun.
        last: when the last one began, and the slot that let it.
        final: bucket -> when its gradients are final, and the slot that makes them.
    """

    order: list[int]
    step: int = 0
    begun: int = 0
    last: tuple[float, int] = (0.0, -1)
    final: dict[int, tuple[float, int]] = field(default_factory=dict)

    def enter(self, step: int) -> None:
        """Starts anew where a new step has begun."""
        if step != self.step:
            self.step, self.begun, self.last, self.final = step, 0, (0.0, -1), {}


class SumEvents:
    """The sums of all steps.

    Args:
        compiled: what is played.
        times: where it is noted.
        queue: of ready transfers; sums are put into it.
    """

    def __init__(self, compiled: Compiled, times: Times, queue: list[Entry]) -> None:
        self._compiled, self._times, self._queue = compiled, times, queue
        self._devices = [_Device(list(order)) for order in compiled.sums_of_device]
        self._of_group: dict[int, list[BucketSum]] = {}
        for bucket in compiled.sums:
            self._of_group.setdefault(bucket.group, []).append(bucket)
        self._begun: dict[int, list[tuple[float, int]]] = {}

    def final(self, device: int, step: int, operation: int) -> None:
        """A device has played a backward in which gradients become final."""
        groups = self._compiled.final_groups[operation]
        slot = step * self._times.num_operations + operation
        start_s, end_s = self._times.start_s[slot], self._times.end_s[slot]
        state = self._devices[device]
        state.enter(step)
        for number in state.order:
            bucket = self._compiled.sums[number]
            if bucket.group in groups:
                early_s = (1 - bucket.ready_fraction) * (end_s - start_s)
                state.final[number] = max(start_s, end_s - early_s), slot
        self._begin(state)

    def flush(self, device: int, step: int, group: int, now_s: float, last: int) -> None:
        """A device has come to a REDUCE: no gradients of its mini-batch are to come any more."""
        state = self._devices[device]
        state.enter(step)
        minibatches = {bucket.minibatch for bucket in self._of_group.get(group, ())}
        for number in state.order[state.begun :]:
            if self._compiled.sums[number].minibatch in minibatches:
                state.final.setdefault(number, (now_s, last))
        self._begin(state)

    def wait(self, group: int, step: int, now_s: float, last: int) -> tuple[int, float, int]:
        """A device waits for the sums of a group.

        Returns:
            The slot of a sum that is not over yet, or -1; when the device goes on, and the slot
            that lets it.
        """
        for bucket in self._of_group.get(group, ()):
            slot = self._slot(bucket, step)
            end_s = self._times.end_s[slot]
            if end_s == NEVER:
                return slot, now_s, last
            if end_s > now_s:
                now_s, last = end_s, slot
        return -1, now_s, last

    def _slot(self, bucket: BucketSum, step: int) -> int:
        return self._times.first_transfer + step * self._times.num_transfers + bucket.transfer

    def _begin(self, state: _Device) -> None:
        """Begins the buckets whose turn it is."""
        while state.begun < len(state.order) and state.order[state.begun] in state.final:
            number = state.order[state.begun]
            state.last = max(state.last, state.final[number])
            state.begun += 1
            self._came(self._compiled.sums[number], state.step, state.last)

    def _came(self, bucket: BucketSum, step: int, begun: tuple[float, int]) -> None:
        """One more device has begun a sum; the last one makes it ready."""
        slot = self._slot(bucket, step)
        all_begun = self._begun.setdefault(slot, [])
        all_begun.append(begun)
        if len(all_begun) == bucket.num_devices:
            ready_s, self._times.cause[slot] = max(self._begun.pop(slot))
            sender = self._compiled.transfers.senders[bucket.transfer]
            place = step * self._times.num_operations + sender
            heapq.heappush(self._queue, (ready_s, place, slot))
