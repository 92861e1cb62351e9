"""The ways of a frame while it is filled from its last boundary to its first."""

from __future__ import annotations

from typing import NamedTuple

from lightning_gpp.planner.graphpipe.frames import Frame
from lightning_gpp.planner.graphpipe.frontier import Way
from lightning_gpp.planner.graphpipe.usage import Usage


class Least(NamedTuple):
    """What no way at some place has less of.

    Attributes:
        devices: devices, of all kinds.
        need: units in flight that a stage before needs (see :class:`Way`).
        offset: likewise.
    """

    devices: int
    need: int
    offset: int


FAR = 1 << 40
"""More than there is of anything."""

NO_WAYS = Least(FAR, FAR, FAR)
"""Where there are no ways."""


class Table:
    """The ways of one frame.

    Attributes:
        frame: the frame.
        tables: those of all frames, by number.
        ways: for every boundary the ways to divide what follows.
        least: for every boundary what the ways there, and in a block behind it, have at least.
        least_at: the same at every point of the frame's trunk.
        fewest: the fewest devices at any point so far.
    """

    def __init__(self, frame: Frame, end: list[Way], tables: Tables, usage: Usage) -> None:
        self.frame = frame
        self.tables = tables
        self._usage = usage
        size = len(frame.run)
        self.ways: list[list[Way]] = [*([] for _ in range(size)), end]
        self.least: list[Least] = [NO_WAYS] * (size + 1)
        self.least_at: list[Least] = [NO_WAYS] * len(frame.trunk)
        self.fewest = FAR
        self._nearest = len(frame.trunk)
        for index in range(size, len(frame.trunk)):
            point = frame.trunk[index]
            self._open(index, tables[point.frame.number].least[point.boundary])
        self.close(size)

    def close(self, boundary: int) -> None:
        """All ways of a boundary, and of the block behind it, are found."""
        ways = self.ways[boundary]
        least = NO_WAYS
        if len(ways) == 1:
            least = Least(self._usage.total(ways[0].used), ways[0].need, ways[0].offset)
        elif ways:
            total = self._usage.total
            needs, offsets, used, _, _ = zip(*ways)
            least = Least(min(map(total, used)), min(needs), min(offsets))
        if boundary in self.frame.run.blocks:
            children = self.frame.children(boundary)
            heads = [one for child in children for one in self.tables[child.number].least]
            least = Least(*map(min, least, *heads))
        self.least[boundary] = least
        if boundary:
            self._open(boundary - 1, least)

    def _open(self, index: int, least: Least) -> None:
        self.least_at[index] = least
        if least.devices < FAR:
            self.fewest = min(self.fewest, least.devices)
            self._nearest = min(self._nearest, index)

    def last_open(self, first: int, stop: int) -> int:
        """The last point before ``stop`` where there are ways; less than ``first`` if none."""
        if stop <= self._nearest:
            return -1
        last = stop - 1
        while last >= first and self.least_at[last].devices == FAR:
            last -= 1
        return last


Tables = dict[int, Table]
"""Frame -> its ways."""
