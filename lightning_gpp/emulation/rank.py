"""One emulated rank of a pipeline: how long everything takes, by the costs of the program.

The rules are those of the simulator; only the moments at which things happen are the runtime's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lightning_gpp.cluster import all_reduce_channels, all_reduce_s, channels
from lightning_gpp.emulation.clock import EmulatedClock, EmulatedCursor
from lightning_gpp.emulation.reservations import SharedReservations
from lightning_gpp.runtime.action_record import ActionRecord
from lightning_gpp.runtime.sums.shared_gradients import SHARED_GRADIENTS
from lightning_gpp.runtime.transport.transport import Tag
from lightning_gpp.schedule import Action, Kind, Program
from lightning_gpp.simulate.program_costs import (
    Bucket,
    MessageCosts,
    ProgramCosts,
    check_costs,
    compute_s,
    message_costs,
)


@dataclass(frozen=True, slots=True)
class DeviceSum:
    """A sum that a device takes part in.

    Attributes:
        ready_fraction: of the backward in which its gradients become final.
        final_in: that backward; None where there is none.
        duration_s: how long it takes once its channels are free.
        channels: what it occupies.
    """

    ready_fraction: float
    final_in: Action | None
    duration_s: float
    channels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Running:
    """A program that runs.

    Attributes:
        program: the program.
        costs: of it, on the emulated cluster.
        device: of this rank.
        sums: in the order in which the device begins them.
        messages: sending stage, receiving stage, whether gradients -> costs, once they are known.
    """

    program: Program
    costs: ProgramCosts
    device: int
    sums: Sequence[DeviceSum]
    messages: dict[tuple[int, int, bool], MessageCosts] = field(default_factory=dict)

    def message(self, action: Action) -> tuple[MessageCosts, int]:
        """The costs of a message between stages, and its units."""
        key = source, target, is_gradient = action.message[:3]
        if key not in self.messages:
            self.messages[key] = message_costs(
                self.program, self.costs, source, target, is_gradient=is_gradient
            )
        return self.messages[key], self.program.num_units(action)

    def group_bytes(self, number: int) -> float:
        """The gradients that the REDUCE actions of a number sum."""
        group = number % len(self.program.reduce_groups)
        return sum(bucket.size_bytes for bucket in self.costs.buckets if bucket.group == group)


class EmulatedRank(EmulatedCursor):
    """The :class:`~lightning_gpp.runtime.pace.Pace` of one rank.

    Args:
        rank: which.
        clock: of all ranks.
        reservations: of all ranks.
        costs_of: what a program costs; asked once for each program.
    """

    def __init__(
        self,
        rank: int,
        clock: EmulatedClock,
        reservations: SharedReservations,
        costs_of: Callable[[Program], ProgramCosts],
    ) -> None:
        super().__init__(rank, clock)
        self.reservations = reservations
        self._costs_of = costs_of
        self._known: dict[int, _Running] = {}
        self._running: _Running | None = None
        self._action: Action | None = None
        self._action_start_s = 0.0
        self._num_actions = self._num_sums = 0
        self._sum_ready_s = 0.0
        self._beginnings: list[tuple[float, Callable[[float], None]]] = []

    @contextlib.contextmanager
    def run(self, program: Program, device: int, has_sums: bool = True) -> Iterator[None]:
        """The body runs a device's part of a program; ``has_sums``: those of gradients, too.

        Raises:
            ValueError: the costs are not of this program, or its sums are not those of the costs.
        """
        if id(program) not in self._known:
            costs = self._costs_of(program)
            check_costs(program, costs)
            self._known[id(program)] = _Running(
                program, costs, device, _sums(program, costs, device)
            )
        self._running = self._known[id(program)]
        self._num_actions, self._num_sums, self._sum_ready_s = 0, 0, 0.0
        try:
            yield
            if has_sums and self._num_sums != len(self._running.sums):
                raise self._other_sums(f"began {self._num_sums} sums")
        finally:
            self._running = None

    def _other_sums(self, what: str) -> ValueError:
        return ValueError(
            f"rank {self.rank} {what} of gradients, but the costs of the program have "
            f"{len(self._in_program.sums)} buckets for it; make them of the parameters that this "
            "model has"
        )

    @contextlib.contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """The body does the work of one action, which takes its emulated time."""
        running, kind, name = self._in_program, action.kind, str(action)
        step = running.costs.step
        if self._num_actions and kind is not Kind.STEP:
            self.spend(name, step.action_s)
        self._num_actions += 1
        self._action, self._action_start_s = action, self.cursor_s
        if kind.is_compute:
            with self.lasting(name, compute_s(running.costs, action)):
                yield
        elif kind is Kind.STEP:
            with self.lasting("optimizer", step.optimizer_s.get(running.device, 0.0)):
                yield
        elif kind is Kind.REDUCE:
            yield
            self.spend(name, step.reduce.seconds(running.group_bytes(action.microbatch)))
        else:
            costs, num_units = running.message(action)
            size_bytes = costs.size.of(num_units)
            if kind.is_send:
                self.spend(name, step.send.seconds(size_bytes))
            yield
            if kind.is_receive:
                self.spend(name, step.receive.seconds(size_bytes))
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

    @contextlib.contextmanager
    def lasting(self, what: str, duration_s: float) -> Iterator[None]:
        """The body does real work that takes a given emulated time, also when it is done sooner.

        Where it takes longer, that is noted as slip.
        """
        start_s = self.cursor_s
        yield
        for ready_s, begin in self._beginnings:
            self.clock.sleep_until(ready_s)
            begin(ready_s)
        self._beginnings = []
        self.cursor_s = start_s
        self.spend(what, duration_s)

    def send(self, tag: Tag, target_device: int) -> float:
        """A message leaves now, or when its channels are free; when it arrives.

        Args:
            tag: of the message; its index may count on from earlier runs.
            target_device: where it goes.
        """
        running = self._in_program
        if tag[0] == SHARED_GRADIENTS:
            size_bytes, cluster = running.group_bytes(tag[1]), running.costs.cluster
            if not size_bytes:
                return self.cursor_s
            duration_s = cluster.link(running.device, target_device).transfer_s(size_bytes)
            taken = channels(cluster, running.device, target_device)
        else:
            assert self._action is not None, "an action sends it"
            costs, num_units = running.message(self._action)
            duration_s, taken = costs.transfer_s(num_units), costs.channels
        return self.reservations.reserve(taken, self.cursor_s, duration_s) + duration_s

    def next_sum(self) -> DeviceSum:
        """The sum whose turn it is.

        Raises:
            ValueError: the costs have fewer sums than the runtime begins.
        """
        sums = self._in_program.sums
        if self._num_sums == len(sums):
            raise self._other_sums(f"begins sum number {self._num_sums + 1}")
        self._num_sums += 1
        return sums[self._num_sums - 1]

    def begin_when_ready(self, found: DeviceSum, begin: Callable[[float], None]) -> None:
        """Lets a sum begin when its gradients are final, and not before the sum before it.

        In the backward that makes them that is a part of its time after its start.
        """
        ready_s = self.cursor_s
        if self._action is not None and self._action == found.final_in:
            ready_s += found.ready_fraction * compute_s(self._in_program.costs, self._action)
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

    def made(bucket: Bucket, minibatch: int) -> DeviceSum:
        group, algorithm = program.reduce_groups[bucket.group], costs.all_reduce
        assert group.stage is not None
        return DeviceSum(
            bucket.ready_fraction,
            program.last_backward(device, group.stage, minibatch),
            all_reduce_s(costs.cluster, group.devices, bucket.size_bytes, algorithm),
            all_reduce_channels(costs.cluster, group.devices, algorithm),
        )

    return [
        made(bucket, minibatch)
        for minibatch in range(program.num_minibatches)
        for bucket in costs.buckets
        if device in program.reduce_groups[bucket.group].devices
        and program.reduce_groups[bucket.group].stage is not None
    ]
