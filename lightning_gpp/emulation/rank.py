"""One emulated rank of a pipeline: what moves its cursor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType

from lightning_gpp.emulation.clock import EmulatedClock, EmulatedCursor
from lightning_gpp.emulation.durations import DeviceSum, Durations
from lightning_gpp.emulation.reservations import SharedReservations
from lightning_gpp.runtime.action_record import ActionRecord
from lightning_gpp.runtime.sums.shared_gradients import SHARED_GRADIENTS
from lightning_gpp.runtime.transport.transport import Tag
from lightning_gpp.schedule import Action, Kind, Program
from lightning_gpp.simulate.program_costs import ProgramCosts


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
        self._known: dict[int, tuple[Program, Durations]] = {}
        self._durations: Durations | None = None
        self._action: Action | None = None
        self._action_start_s = 0.0
        self._num_actions = self._num_sums = 0
        self._sum_ready_s = 0.0
        self._beginnings: list[tuple[float, Callable[[float], None]]] = []

    # What it does --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def run(self, program: Program, device: int, has_sums: bool = True) -> Iterator[None]:
        """The body runs a device's part of a program; ``has_sums``: those of gradients, too.

        Raises:
            ValueError: the costs are not of this program, or its sums are not those of the costs.
        """
        if id(program) not in self._known:
            self._known[id(program)] = program, Durations(program, self._costs_of(program), device)
        self._durations = self._known[id(program)][1]
        self._num_actions, self._num_sums, self._sum_ready_s = 0, 0, 0.0
        try:
            yield
            if has_sums:
                self._check_sums(self._durations)
        finally:
            self._durations = None

    def _check_sums(self, durations: Durations) -> None:
        if self._num_sums != len(durations.sums):
            raise ValueError(
                f"rank {self.rank} began {self._num_sums} sums of gradients, but the costs of the "
                f"program have {len(durations.sums)} buckets for it; make them of the parameters "
                "that this model has"
            )

    @contextlib.contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """The body does the work of one action."""
        if self._num_actions and action.kind is not Kind.STEP:
            self.spend(str(action), self._in_program.costs.step.action_s)
        self._num_actions += 1
        self._action, self._action_start_s = action, self.cursor_s
        with HANDLERS[action.kind](self, action):
            yield
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

    def _compute(self, action: Action) -> AbstractContextManager[None]:
        return self.lasting(str(action), self._in_program.compute_s(action))

    @contextlib.contextmanager
    def _send(self, action: Action) -> Iterator[None]:
        durations = self._in_program
        size_bytes = durations.message(action.message).size_bytes
        self.spend(str(action), durations.costs.step.send.seconds(size_bytes))
        yield

    @contextlib.contextmanager
    def _receive(self, action: Action) -> Iterator[None]:
        yield
        durations = self._in_program
        size_bytes = durations.message(action.message).size_bytes
        self.spend(str(action), durations.costs.step.receive.seconds(size_bytes))

    @contextlib.contextmanager
    def _reduce(self, action: Action) -> Iterator[None]:
        yield
        durations = self._in_program
        size_bytes = durations.group_bytes(action.microbatch)
        self.spend(str(action), durations.costs.step.reduce.seconds(size_bytes))

    def _update(self, action: Action) -> AbstractContextManager[None]:
        return self.lasting("optimizer", self._in_program.update_s())

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

    # What messages and sums ask ------------------------------------------------------------------

    def send(self, tag: Tag, target_device: int) -> float:
        """A message leaves now, or when its channels are free; when it arrives.

        Args:
            tag: of the message; its index may count on from earlier runs.
            target_device: where it goes.
        """
        durations = self._in_program
        if tag[0] == SHARED_GRADIENTS:
            found = durations.shared_gradients(tag[1], target_device)
        else:
            assert self._action is not None, "an action sends it"
            found = durations.message(self._action.message)
        start_s = self.reservations.reserve(found.channels, self.cursor_s, found.duration_s)
        return start_s + found.duration_s

    def next_sum(self) -> DeviceSum:
        """The sum whose turn it is.

        Raises:
            ValueError: the costs have fewer sums than the runtime begins.
        """
        durations = self._in_program
        if self._num_sums == len(durations.sums):
            raise ValueError(
                f"rank {self.rank} begins sum number {self._num_sums + 1} of gradients, but the "
                f"costs of the program have {self._num_sums} buckets for it; make them of the "
                "parameters that this model has"
            )
        self._num_sums += 1
        return durations.sums[self._num_sums - 1]

    def begin_when_ready(self, found: DeviceSum, begin: Callable[[float], None]) -> None:
        """Lets a sum begin when its gradients are final, and not before the sum before it.

        In the backward that makes them that is a part of its time after its start.
        """
        ready_s = self.cursor_s
        if self._action is not None and self._action == found.final_in:
            duration_s = self._in_program.compute_s(self._action)
            ready_s += found.bucket.ready_fraction * duration_s
        ready_s = self._sum_ready_s = max(self._sum_ready_s, ready_s)
        if self._action is not None and self._action.kind.is_compute:
            self._beginnings.append((ready_s, begin))
        else:
            begin(ready_s)

    @property
    def _in_program(self) -> Durations:
        assert self._durations is not None, "only while a program runs"
        return self._durations


HANDLERS: Mapping[Kind, Callable[[EmulatedRank, Action], AbstractContextManager[None]]] = (
    MappingProxyType(
        {
            Kind.FORWARD: EmulatedRank._compute,
            Kind.BACKWARD: EmulatedRank._compute,
            Kind.SEND_FORWARD: EmulatedRank._send,
            Kind.RECEIVE_FORWARD: EmulatedRank._receive,
            Kind.SEND_BACKWARD: EmulatedRank._send,
            Kind.RECEIVE_BACKWARD: EmulatedRank._receive,
            Kind.REDUCE: EmulatedRank._reduce,
            Kind.STEP: EmulatedRank._update,
        }
    )
)
"""How each kind of action takes its emulated time, around the work of its body."""
