"""A device's pace through a program by the prices of described devices.

A *cursor* is the moment at which a device is, on a clock of emulated seconds. Computing moves it;
at a collective all devices tell where they are, and go on when the last one has come and the
network is free. Sums of gradients take the network in the order in which they begin, and devices
wait for them at the end of the backward: as :mod:`lightning_gpp.spmd.costs.simulate` says.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from lightning_gpp.spmd.costs.collective_times import CollectiveTimes
from lightning_gpp.spmd.costs.prices import PriceList
from lightning_gpp.spmd.gradient_buckets import bytes_in_bucket
from lightning_gpp.spmd.program import Computation, Instruction, SpmdProgram
from lightning_gpp.spmd.run.collectives import Collectives


class Cursor(Protocol):
    """Where a device is, in emulated seconds."""

    cursor_s: float

    def spend(self, what: str, duration_s: float) -> None:
        """Lets time pass."""

    def wait_until(self, moment_s: float) -> None:
        """Waits for a moment, if it is still to come."""


def instruction_name(instruction: Instruction) -> str:
    """What reports call an instruction."""
    if isinstance(instruction, Computation):
        return instruction.operator
    return f"{type(instruction).__name__} {instruction.value}"


@dataclass(frozen=True, slots=True)
class OwnHalf:
    """What a half of an instruction takes on one device: a collective of all first, then work."""

    move_s: float
    compute_s: float


def own_halves(
    program: SpmdProgram, prices: PriceList, rank: int
) -> dict[bool, tuple[OwnHalf, ...]]:
    """Whether backward -> the halves of all instructions on a device; sums in buckets left out."""
    found = {}
    for is_backward in (False, True):
        halves = []
        for instruction in program.instructions:
            half = prices.of(instruction).halves[is_backward]
            is_later = is_backward and bytes_in_bucket(program, instruction, prices.graph)
            halves.append(OwnHalf(0.0 if is_later else half.move_s, float(half.compute_s[rank])))
        found[is_backward] = tuple(halves)
    return found


@dataclass(slots=True)
class EmulatedProgram:
    """The pace of one device of a program.

    Attributes:
        cursor: of this device.
        collectives: of this device with the others, by which they tell where they are.
        halves: by :func:`own_halves`.
        times: of collectives.
        names: of the instructions, for reports.
    """

    cursor: Cursor
    collectives: Collectives
    halves: dict[bool, tuple[OwnHalf, ...]]
    times: CollectiveTimes
    names: tuple[str, ...]
    _ahead_s: float = 0.0
    """Computed, but not let pass yet."""
    _network_s: float = 0.0
    _sums: list[tuple[Callable[[], torch.Tensor], float, list[float]]] = field(default_factory=list)

    def passed(self, instruction: int, *, is_backward: bool) -> None:
        """Meets the other devices where they exchange something; computing adds up."""
        half = self.halves[is_backward][instruction]
        if half.move_s:
            self._spend(self.names[instruction])
            moments = self._tell(self.cursor.cursor_s)()
            self._settle_sums()
            self._network_s = max(float(moments.max()), self._network_s) + half.move_s
            self.cursor.wait_until(self._network_s)
        self._ahead_s += half.compute_s

    def begin_sum(self, size_bytes: int) -> Callable[[], None]:
        """A sum that begins when all devices have come this far, and the network is free."""
        end_s: list[float] = []
        moments = self._tell(self.cursor.cursor_s + self._ahead_s)
        self._sums.append((moments, self.times.all_reduce_s(size_bytes), end_s))

        def ended() -> None:
            self._spend("backward")
            self._settle_sums()
            self.cursor.wait_until(end_s[0])

        return ended

    def end_half(self) -> None:
        """Lets pass what was computed."""
        self._spend("the end")

    def _spend(self, what: str) -> None:
        ahead_s, self._ahead_s = self._ahead_s, 0.0
        self.cursor.spend(what, ahead_s)

    def _settle_sums(self) -> None:
        """When the sums end that have begun, in their order: all devices have told of theirs."""
        begun, self._sums = self._sums, []
        for moments, seconds, end_s in begun:
            self._network_s = max(float(moments().max()), self._network_s) + seconds
            end_s.append(self._network_s)

    def _tell(self, moment_s: float) -> Callable[[], torch.Tensor]:
        """All devices' moments, as a sum of vectors that have one each."""
        own = torch.zeros(self.collectives.num_ranks, dtype=torch.float64)
        own[self.collectives.rank] = moment_s
        return self.collectives.begin_all_reduce(own, purpose="telling emulated moments")


@dataclass(slots=True)
class MeasuredSlowness:
    """Tells no time, but notes how much longer everything takes really than emulated.

    Attributes:
        halves: by :func:`own_halves`.
        pairs: real and emulated seconds from collective to collective.
    """

    halves: dict[bool, tuple[OwnHalf, ...]]
    pairs: list[tuple[float, float]] = field(default_factory=list)
    _since: float = field(default_factory=time.perf_counter)
    _emulated_s: float = 0.0

    def begin_half(self) -> None:
        """Real time counts from here."""
        self._since, self._emulated_s = time.perf_counter(), 0.0

    def passed(self, instruction: int, *, is_backward: bool) -> None:
        """A collective ends a stretch."""
        half = self.halves[is_backward][instruction]
        if half.move_s:
            self._emulated_s += half.move_s
            self.end_half()
        self._emulated_s += half.compute_s

    def begin_sum(self, size_bytes: int) -> Callable[[], None]:
        """Belongs to the stretch that it is in."""
        del size_bytes
        return lambda: None

    def end_half(self) -> None:
        """Ends a stretch."""
        now = time.perf_counter()
        self.pairs.append((now - self._since, self._emulated_s))
        self._since, self._emulated_s = now, 0.0
