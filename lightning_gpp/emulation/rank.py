"""One emulated rank: makes each action take the time that the cost model gives it.

Its transport and its sums are real ones, which wait until their emulated moments.

The rules are those of the simulator; only the moments at which things happen are the runtime's.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_gpp.cluster import all_reduce_channels, all_reduce_s, channels
from lightning_gpp.emulation.shared import EmulatedClock, SharedReservations
from lightning_gpp.runtime.payload import Payload
from lightning_gpp.runtime.run_state import ActionRecord
from lightning_gpp.runtime.sums import SHARED_GRADIENTS, PendingSum, Ranks, Sums
from lightning_gpp.runtime.transport.transport import Tag, Transport
from lightning_gpp.schedule import Action, Program
from lightning_gpp.simulate.program_costs import (
    ProgramCosts,
    compute_s,
    message_costs,
)


@dataclass(frozen=True, slots=True)
class DeviceSum:
    """An all-reduce in which a device takes part.

    Attributes:
        ready_fraction: part of the backward after which its gradients are final.
        final_in: the backward that makes them final; None if there is none.
        duration_s: how long it takes once its channels are free.
        channels: what it occupies.
    """

    ready_fraction: float
    final_in: Action | None
    duration_s: float
    channels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Running:
    """A program that runs, and the sums that a device takes part in, in order."""

    program: Program
    device: int
    sums: list[DeviceSum]


class EmulatedRank:
    """The :class:`~lightning_gpp.runtime.run_state.Pace` of one rank.

    Args:
        clock: shared by all ranks.
        reservations: shared by all ranks.
        costs: of the programs that it runs.

    Attributes:
        cursor_s: emulated time at which this rank is.
        slip_s: emulated seconds by which real work was late.
    """

    def __init__(
        self, clock: EmulatedClock, reservations: SharedReservations, costs: ProgramCosts
    ) -> None:
        self.clock, self.reservations = clock, reservations
        self.cursor_s = self.slip_s = 0.0
        self._costs = costs
        self._known: dict[int, _Running] = {}
        self._running: _Running | None = None
        self._action: Action | None = None
        self._action_start_s = self._sum_ready_s = 0.0
        self._num_sums = 0
        self._beginnings: list[tuple[float, Callable[[float], None]]] = []

    def spend(self, duration_s: float) -> None:
        """Lets emulated time pass.

        Nothing is late that takes no time: what follows it makes up for it, or slips.
        """
        if duration_s <= 0:
            return
        end_s, now_s = self.cursor_s + duration_s, self.clock.now_s()
        self.slip_s += max(0.0, now_s - end_s)
        self.cursor_s = max(end_s, now_s)
        self.clock.sleep_until(end_s)

    def wait_until(self, moment_s: float) -> None:
        """Waits for something that comes at a moment, if it is still to come."""
        self.cursor_s = max(self.cursor_s, moment_s)
        self.clock.sleep_until(self.cursor_s)

    @contextlib.contextmanager
    def run(self, program: Program, device: int) -> Iterator[None]:
        """The body runs a device's part of a program, or a half of it: all sums or none."""
        if id(program) not in self._known:
            sums = _sums(program, self._costs, device)
            self._known[id(program)] = _Running(program, device, sums)
        self._running = self._known[id(program)]
        self._num_sums, self._sum_ready_s = 0, 0.0
        try:
            yield
            every = len(self._running.sums)
            assert self._num_sums in (0, every), "the costs have as many sums as the runtime begins"
        finally:
            self._running = None

    @contextlib.contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """The body does the work of one action, which takes its emulated time."""
        self._action, self._action_start_s = action, self.cursor_s
        yield
        if action.kind.is_compute:
            for ready_s, begin in self._beginnings:
                self.clock.sleep_until(ready_s)
                begin(ready_s)
            self._beginnings = []
            self.cursor_s = self._action_start_s
            self.spend(compute_s(self._costs, action))
        self._action = None

    def timed(self, record: ActionRecord) -> ActionRecord:
        """The record of the last action with its emulated moments, any slip included."""
        scale = self.clock.time_scale * 1e9
        return replace(
            record,
            start_ns=round(self._action_start_s * scale),
            end_ns=round(self.cursor_s * scale),
            loss_start_ns=None,
        )

    def send(self, tag: Tag, target_device: int) -> float:
        """A message leaves now, or when its channels are free; when it arrives.

        Args:
            tag: of the message; its index may count on from earlier runs.
            target_device: where it goes.
        """
        running = self._in_program
        if tag[0] == SHARED_GRADIENTS:
            group, cluster = tag[1] % len(running.program.reduce_groups), self._costs.cluster
            buckets = [bucket for bucket in self._costs.buckets if bucket.group == group]
            size_bytes = sum(bucket.size_bytes for bucket in buckets)
            if not size_bytes:
                return self.cursor_s
            duration_s = cluster.link(running.device, target_device).transfer_s(size_bytes)
            taken = channels(cluster, running.device, target_device)
        else:
            assert self._action is not None, "an action sends it"
            program, (source, target, is_gradient, _) = running.program, self._action.message
            costs = message_costs(program, self._costs, source, target, is_gradient=is_gradient)
            duration_s, taken = costs.transfer_s(program.num_units(self._action)), costs.channels
        return self.reservations.reserve(taken, self.cursor_s, duration_s) + duration_s

    def next_sum(self) -> DeviceSum:
        """The sum whose turn it is."""
        self._num_sums += 1
        return self._in_program.sums[self._num_sums - 1]

    def begin_when_ready(self, found: DeviceSum, begin: Callable[[float], None]) -> None:
        """Lets a sum begin when its gradients are final, and not before the sum before it.

        In the backward that makes them that is a part of its time after its start.
        """
        ready_s = self.cursor_s
        if self._action is not None and self._action == found.final_in:
            ready_s += found.ready_fraction * compute_s(self._costs, self._action)
        ready_s = self._sum_ready_s = max(self._sum_ready_s, ready_s)
        if self._action is not None and self._action.kind.is_compute:
            self._beginnings.append((ready_s, begin))
        else:
            begin(ready_s)

    @property
    def _in_program(self) -> _Running:
        assert self._running is not None, "only while a program runs"
        return self._running


def _sums(program: Program, costs: ProgramCosts, device: int) -> list[DeviceSum]:
    """What a device sums in a program, in order."""
    cluster, found = costs.cluster, []
    for minibatch in range(program.num_minibatches):
        for bucket in costs.buckets:
            group = program.reduce_groups[bucket.group]
            if group.stage is not None and device in group.devices:
                final = program.last_backward(device, group.stage, minibatch)
                duration_s = all_reduce_s(cluster, group.devices, bucket.size_bytes)
                taken = all_reduce_channels(cluster, group.devices)
                found.append(DeviceSum(bucket.ready_fraction, final, duration_s, taken))
    return found


class EmulatedTransport:
    """A :class:`~lightning_gpp.runtime.transport.transport.Transport` for the messages of programs.

    Really, a message comes as fast as it can. It carries the moment of its emulated arrival along,
    as one more tensor, and the receiver waits until then.

    Args:
        inner: moves the messages.
        rank: the emulated rank that uses it.
        rank_of_device: rank of every device of the plan.

    Attributes:
        rank: number of this rank.
        num_ranks: how many can talk to each other.
    """

    def __init__(self, inner: Transport, rank: EmulatedRank, rank_of_device: Sequence[int]) -> None:
        self._inner = inner
        self._emulated = rank
        self._rank_of_device = rank_of_device
        self.rank, self.num_ranks = inner.rank, inner.num_ranks

    def send(self, payload: Payload, *, target: int, tag: Tag) -> None:
        """Hands a message over; it leaves when its channels are free."""
        arrival_s = self._emulated.send(tag, self._rank_of_device.index(target))
        stamp = torch.tensor(arrival_s, dtype=torch.float64, device="cpu")
        stamped = replace(
            payload,
            tensors=[*payload.tensors, stamp],
            requires_grad=[*payload.requires_grad, False],
        )
        self._inner.send(stamped, target=target, tag=tag)

    def receive(self, *, source: int, tag: Tag, timeout_s: float, purpose: str) -> Payload:
        """Waits for a message, and until its emulated arrival."""
        stamped = self._inner.receive(source=source, tag=tag, timeout_s=timeout_s, purpose=purpose)
        stamp = stamped.tensors[-1]
        assert stamp is not None, "the last tensor is the arrival"
        self._emulated.wait_until(stamp.item())
        return replace(
            stamped, tensors=stamped.tensors[:-1], requires_grad=stamped.requires_grad[:-1]
        )

    def flush(self) -> None:
        """Waits until everything sent so far has left."""
        self._inner.flush()


class EmulatedSums:
    """The :class:`~lightning_gpp.runtime.sums.Sums` of an emulated rank.

    A sum really begins when its gradients are final in emulated time, so that all its ranks have
    said when they were ready once it is over. It ends when its rounds are done.

    Args:
        inner: sums the tensors.
        rank: the emulated rank that uses it.
    """

    def __init__(self, inner: Sums, rank: EmulatedRank) -> None:
        self._inner = inner
        self._emulated = rank
        self._counts: Counter[Ranks] = Counter()

    def start(self, tensor: Tensor, ranks: Ranks) -> PendingSum:
        """Begins to sum a tensor, as soon as it is final in emulated time."""
        meeting = ranks, self._counts[ranks]
        self._counts[ranks] += 1
        emulated, found, begun = self._emulated, self._emulated.next_sum(), list[PendingSum]()

        def begin(ready_s: float) -> None:
            emulated.reservations.meet(meeting, ready_s, found.channels, found.duration_s)
            begun.append(self._inner.start(tensor, ranks))

        def wait(timeout_s: float, purpose: str) -> None:
            begun[0](timeout_s, purpose)  # a sum begins in the action that starts it
            emulated.wait_until(emulated.reservations.end_s(meeting))

        emulated.begin_when_ready(found, begin)
        return wait
