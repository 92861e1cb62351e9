"""A device's pace through a program by the prices of described devices.

A *cursor* is the moment at which a device is, on a clock of emulated seconds. Computing moves it;
at a collective all devices tell where they are, and go on when the last one has come and the
network is free. Real work that is late there may still be made up for; at the end of a half it is
late. Sums of gradients take the network in the order in which they begin, and devices
wait for them at the end of the backward: as :mod:`lightning_gpp.spmd.costs.judge` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from lightning_gpp.spmd.costs.machine import CollectiveTimes, Machine
from lightning_gpp.spmd.costs.prices import PriceList
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.program import SpmdProgram, bytes_in_bucket
from lightning_gpp.spmd.run.collectives import Collectives


class Cursor(Protocol):
    """Where a device is, in emulated seconds."""

    cursor_s: float

    def wait_until(self, moment_s: float) -> None:
        """Waits for a moment, if it is still to come."""

    def end(self, what: str) -> None:
        """Nothing follows that could make up for what is late."""


@dataclass(slots=True)
class CountedTime:
    """A cursor that waits for nothing.

    Attributes:
        cursor_s: where the device is, in emulated seconds.
    """

    cursor_s: float = 0.0

    def wait_until(self, moment_s: float) -> None:
        """Time passes up to a moment."""
        self.cursor_s = max(self.cursor_s, moment_s)

    def end(self, what: str) -> None:
        """Nothing is late."""


@dataclass(slots=True)
class EmulatedProgram:
    """The pace of one device of a program.

    Attributes:
        collectives: of this device with the others, by which they tell where they are.
        halves: number of an instruction, and whether it goes backward -> seconds of a collective of
            all devices, and of what this one computes after it; sums in buckets left out.
        times: of collectives.
        cursor: of this device.
    """

    collectives: Collectives
    halves: Mapping[tuple[int, bool], tuple[float, float]]
    times: CollectiveTimes
    cursor: Cursor = field(default_factory=CountedTime)
    _ahead_s: float = 0.0
    """Computed, but not let pass yet."""
    _network_s: float = 0.0
    _sums: list[tuple[Callable[[], torch.Tensor], float, list[float]]] = field(default_factory=list)

    @classmethod
    def of(
        cls, graph: SpmdGraph, program: SpmdProgram, collectives: Collectives, machine: Machine
    ) -> EmulatedProgram:
        """The pace of the device that the collectives are of."""
        prices, halves = PriceList(graph, machine, program.shares), {}
        for number, instruction in enumerate(program.instructions):
            for is_backward, half in enumerate(prices.of(instruction).halves):
                is_later = is_backward and bytes_in_bucket(program, instruction, graph)
                move_s = 0.0 if is_later else half.move_s
                halves[number, bool(is_backward)] = move_s, float(half.compute_s[collectives.rank])
        return cls(collectives, halves, machine.times)

    def begin_half(self, cursor: Cursor) -> None:
        """The network is free, and this device is where a cursor is."""
        self.cursor, self._ahead_s, self._network_s = cursor, 0.0, 0.0
        self._sums.clear()

    def passed(self, instruction: int, *, is_backward: bool) -> None:
        """Meets the other devices where they exchange something; computing adds up."""
        move_s, compute_s = self.halves[instruction, is_backward]
        if move_s:
            self._spend()
            moments = self._tell(self.cursor.cursor_s)()
            self._settle_sums()
            self._network_s = max(float(moments.max()), self._network_s) + move_s
            self.cursor.wait_until(self._network_s)
        self._ahead_s += compute_s

    def begin_sum(self, size_bytes: int) -> Callable[[], None]:
        """A sum that begins when all devices have come this far, and the network is free."""
        end_s: list[float] = []
        moments = self._tell(self.cursor.cursor_s + self._ahead_s)
        self._sums.append((moments, self.times.all_reduce_s(size_bytes), end_s))

        def ended() -> None:
            self._spend()
            self._settle_sums()
            self.cursor.wait_until(end_s[0])

        return ended

    def end_half(self, *, is_backward: bool) -> None:
        """Lets pass what was computed."""
        self._spend()
        self.cursor.end("backward" if is_backward else "forward")

    def _spend(self) -> None:
        ahead_s, self._ahead_s = self._ahead_s, 0.0
        if ahead_s:
            self.cursor.wait_until(self.cursor.cursor_s + ahead_s)

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
