"""The units in a line, divided among groups of devices by what these take for a run of units.

The series decomposition of GraphPipe (arXiv 2406.17145, section 5.2): units stand in the
depth-first order, in which branches stay together. What runs beside each other, how much messages
and sums of gradients hide and what stages hold is left to the climb that begins here.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from typing import NamedTuple

from lightning_gpp.engine.play import ROUNDING
from lightning_gpp.planner.graphpipe.draft import Draft, DraftStage
from lightning_gpp.planner.graphpipe.homes import given_out
from lightning_gpp.planner.graphpipe.unit_tables import UnitTables

HALVINGS = 6
"""Of the interval of limits, on a logarithmic scale: 64 devices are told apart to 7 %."""

NUM_KEPT = 3
"""Divisions of one search: that with the smallest limit, and those with larger ones before it."""


MESSAGES = (0, 1, 4)
"""How often messages count: some hide behind computing, and all make the first micro-batch late."""


def balanced(lines: Sequence[Sequence[float]]) -> list[int] | None:
    """Borders with which the slowest group is as fast as can be; None if some have nothing to do.

    A limit that is too low becomes the least one with which some group could take a unit more.

    Args:
        lines: of every group the running sums of seconds over the units.

    >>> even = [0, 1, 2, 3, 4, 5]
    >>> balanced([even, [2 * seconds for seconds in even]])
    [0, 4, 5]
    """
    last = len(lines[0]) - 1
    rates = [1 / line[-1] for line in lines if line[-1]]
    limit_s = 1 / sum(rates) if len(rates) == len(lines) else 0.0
    while last >= len(lines):
        borders, slowest_s, next_s = [0], 0.0, math.inf
        for number, line in enumerate(lines, 1):
            start, most = borders[-1], last - (len(lines) - number)
            stop = bisect_right(line, line[start] + limit_s) - 1
            borders.append(min(most, max(stop, start + 1)))
            took_s = line[borders[-1]] - line[start]
            slowest_s = max(slowest_s, took_s)
            more_s = line[min(most, borders[-1] + 1)] - line[start]
            next_s = min([next_s, *(one for one in (took_s, more_s) if one > limit_s)])
        if borders[-1] == last and slowest_s <= limit_s:
            return borders
        limit_s = next_s * (1 + ROUNDING)
    return None


class LineRun(NamedTuple):
    """Units that follow one another, and their group.

    Attributes:
        start: the place of the first unit.
        stop: behind the last one.
        kind: of the devices.
        size: how many devices.
    """

    start: int
    stop: int
    kind: str
    size: int


def divisions(tables: UnitTables) -> Iterator[Draft]:
    """Divisions of the line with small bottlenecks, for every size of micro-batches.

    Groups share each micro-batch, or their devices take whole ones in turn; sums of gradients count
    or not, as they may go on beside the computing.
    """
    request = tables.request
    kinds = [device.kind for device in request.cluster.devices]
    counts = request.replica_counts(len(kinds))
    is_cuttable = all(value.is_cuttable for value in request.graph.values.values())
    may_differ = request.num_microbatches is None and is_cuttable and len(counts) > 1
    orders = dict.fromkeys((tuple(sorted(kinds)), tuple(sorted(kinds, reverse=True))))
    turns = (False, True) if may_differ else (False,)
    sums = (False, True) if len(counts) > 1 else (False,)
    ways = [
        LineCosts(tables, size, in_turn, has_sums, messages)
        for size in request.microbatch_sizes
        for in_turn, has_sums, messages in product(turns, sums, MESSAGES)
    ]
    for line in ways:
        sizes = [count for count in counts if line.in_turn or count == 1 or not line.size % count]
        for most, order in product(range(1, len(sizes) + 1), orders):
            for runs in line.narrowed(order, sizes[:most]):
                yield line.draft(runs, kinds)


@dataclass(frozen=True)
class LineCosts:
    """What a run takes of a mini-batch in one way of counting.

    Attributes:
        tables: of the units.
        size: samples of a micro-batch.
        in_turn: whether devices of a group take whole micro-batches.
        has_sums: whether sums of gradients count.
        messages: how often messages count.
    """

    tables: UnitTables
    size: float
    in_turn: bool
    has_sums: bool
    messages: int

    @property
    def count(self) -> int:
        """Micro-batches of a mini-batch."""
        return round(self.tables.request.minibatch_size / self.size)

    @cached_property
    def _found(self) -> dict[tuple[str, int], list[float]]:
        return {}

    def seconds(self, kind: str, size: int) -> list[float]:
        """Running sums over the units, of a group of some devices."""
        found = self._found.get((kind, size))
        if found is None:
            share = self.size if self.in_turn else self.size / size
            times = self.count / size if self.in_turn else self.count
            each_s = [times * seconds for seconds in self.tables.each_s(share, kind)]
            if self.has_sums and size > 1:
                each_s = [one + self._sum_s(at, kind, size) for at, one in enumerate(each_s)]
            found = self._found[kind, size] = [*accumulate(each_s, initial=0.0)]
        return found

    def _sum_s(self, at: int, kind: str, size: int) -> float:
        request = self.tables.request
        devices = [at for at, one in enumerate(request.cluster.devices) if one.kind == kind]
        trained = request.tables.parameter_bytes(self.tables.operators(1 << at)).trained_bytes
        return request.tables.reduce_s(tuple(devices[:size]), trained)

    @cached_property
    def _borders_s(self) -> list[float]:
        """Seconds of the messages over every border, one way."""
        tables, request = self.tables, self.tables.request
        borders_s = [0.0] * (tables.num_units + 1)
        if self.messages and request.num_devices > 1:
            link = request.cluster.link(0, 1)
            for at in range(1, tables.num_units):
                before = (1 << at) - 1
                carried = tables.carried(before, tables.everything & ~before, takes_outputs=False)
                if carried.values:
                    sizes = request.tables.edge_bytes(carried.values)
                    borders_s[at] = (
                        self.messages * self.count * link.transfer_s(sizes.forward(self.size))
                    )
        return borders_s

    def narrowed(self, kinds: Sequence[str], sizes: Sequence[int]) -> list[list[LineRun]]:
        """The best divisions on the way to the smallest limit.

        Args:
            kinds: of the devices in the order in which groups take them.
            sizes: of groups.
        """
        slowest_s = max(self.seconds(kind, 1)[-1] for kind in kinds) + 2 * max(self._borders_s)
        low_s, high_s, found = slowest_s / (4 * len(kinds)), slowest_s, []
        for _ in range(HALVINGS):
            limit_s = math.sqrt(low_s * high_s)
            runs = self._divided(kinds, sizes, limit_s)
            if runs is None:
                low_s = limit_s
            else:
                high_s = limit_s
                found.append(runs)
        return found[-NUM_KEPT:]

    def _divided(
        self, kinds: Sequence[str], sizes: Sequence[int], limit_s: float
    ) -> list[LineRun] | None:
        """The runs for the fewest devices that all keep to a limit; None where there are none.

        The dual of ``DP`` in algorithm 1 of GraphPipe: how far the first devices come. Where groups
        of different sizes come as far the largest is taken, which makes fewer stages.
        """
        last, borders_s = self.tables.num_units, self._borders_s
        far, taken = [0], [0]
        while far[-1] < last:
            end = len(far)
            if end > len(kinds):
                return None
            far.append(-1)
            taken.append(0)
            for size in sizes:
                if size > end or len({*kinds[end - size : end]}) > 1:
                    break
                start, line = far[end - size], self.seconds(kinds[end - 1], size)
                stop = bisect_right(line, line[start] + limit_s) - 1
                while stop > start and line[stop] - line[start] > limit_s - (
                    (borders_s[start] + borders_s[stop]) / size
                ):
                    stop -= 1
                if stop >= far[end]:
                    far[end], taken[end] = stop, size
        runs, end = [], len(far) - 1
        while end:
            before = end - taken[end]
            runs.append(LineRun(far[before], far[end], kinds[before], taken[end]))
            end = before
        return [one for one in reversed(runs) if one.start < one.stop]

    def draft(self, runs: Sequence[LineRun], kinds: Sequence[str]) -> Draft:
        """The draft, where the largest groups have the first choice, to lie within hosts."""
        parts = 1 if self.in_turn else max(one.size for one in runs)
        by_size = sorted(range(len(runs)), key=lambda number: -runs[number].size)
        groups = given_out([(one.kind, one.size) for one in runs], kinds, by_size)
        assert groups is not None  # they were counted
        stages = [
            DraftStage(
                (1 << one.stop) - (1 << one.start), devices, one.size if self.in_turn else parts
            )
            for one, devices in zip(runs, groups)
        ]
        return Draft(tuple(stages), self.count * parts).reduced()
