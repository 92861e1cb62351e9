"""The ways of a frame while it is filled from its last boundary to its first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_gpp.planner.graphpipe.divide.frontier import Way
from lightning_gpp.planner.graphpipe.space.frames import Frame
from lightning_gpp.planner.graphpipe.space.usage import DeviceCounts

FAR = 1 << 40
"""More than there is of anything."""


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


NO_WAYS = Least(FAR, FAR, FAR)
"""Where there are no ways."""


class Table:
    """The ways of one frame.

    Attributes:
        frame: the frame.
        tables: those of all frames, by number.
        ways: for every boundary the ways to divide what follows.
        is_filled: for every boundary whether they are all found.
        least: for every boundary what the ways there, and in a block behind it, have at least.
        least_at: the same at every point of the frame's trunk.
        behind: a lower bound of the devices behind the first so many points of the trunk.
        has_refused: whether a stage had too many messages, or did not find enough memory.
    """

    def __init__(self, frame: Frame, end: list[Way], tables: Tables, usage: DeviceCounts) -> None:
        self.frame = frame
        self.tables = tables
        self._usage = usage
        size = len(frame.run)
        self.ways: list[list[Way]] = [*([] for _ in range(size)), end]
        self.is_filled = [False] * (size + 1)
        self.least = [NO_WAYS] * (size + 1)
        self.least_at = [NO_WAYS] * len(frame.trunk)
        self.behind = [0] * (len(frame.trunk) + 1)
        self.has_refused = False
        for index in range(size, len(frame.trunk)):
            point = frame.trunk[index]
            self.least_at[index] = tables[point.frame.number].least[point.boundary]
        self.close(size)

    def close(self, boundary: int) -> None:
        """All ways of a boundary, and of the block behind it, are found."""
        self.is_filled[boundary] = True
        least = _least(self.ways[boundary], self._usage)
        if boundary in self.frame.run.blocks:
            children = self.frame.children(boundary)
            heads = [one for child in children for one in self.tables[child.number].least]
            if any(one is not NO_WAYS for one in heads):
                least = Least(*map(min, zip(least, *heads)))
        self.least[boundary] = least
        if boundary:
            self.least_at[boundary - 1] = least

    def bound(self, num_replicas: Sequence[int], stops: Sequence[Sequence[int]]) -> None:
        """Finds the fewest devices behind the first so many points, if only time counts.

        Args:
            num_replicas: of all crews.
            stops: for every boundary and crew, how many points a stage may end at.
        """
        size = len(self.frame.run)
        found = [FAR] * size + [self.least[size].devices]
        for least in self.least_at[size:]:
            found.append(min(found[-1], least.devices))
        for boundary in range(size - 1, -1, -1):
            for count, stop in zip(num_replicas, stops[boundary]):
                if stop > boundary and count + found[stop] < found[boundary]:
                    found[boundary] = count + found[stop]
        self.behind = found


def _least(ways: list[Way], usage: DeviceCounts) -> Least:
    if not ways:
        return NO_WAYS
    if len(ways) == 1:
        return Least(usage.total(ways[0].used), ways[0].need, ways[0].offset)
    needs, offsets, used, _, _ = zip(*ways)
    return Least(min(map(usage.total, used)), min(needs), min(offsets))


Tables = dict[int, Table]
"""Frame -> its ways."""
