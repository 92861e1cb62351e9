"""The groups of devices that stages of a draft may go to."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpp.planner.graphpipe.place.draft import Draft, DraftStage
from lightning_gpp.planner.graphpipe.place.unit_tables import UnitTables

Devices = tuple[int, ...]


class Homes:
    """Groups of devices for a draft: those that it has, and the least busy blocks of every size.

    A block of ``r`` devices begins at a multiple of ``r``, so that blocks of one size do not
    overlap and those of hosts stay within them.

    Args:
        draft: the draft.
        tables: of its units.
    """

    def __init__(self, draft: Draft, tables: UnitTables) -> None:
        request = tables.request
        count = request.num_devices
        busy_s = [0.0] * count
        for stage in draft.stages:
            for device in stage.devices:
                busy_s[device] += tables.seconds(stage.units) / stage.num_replicas
        self._count, self._busy_s, self._draft = count, busy_s, draft
        self._sizes = request.replica_counts(count)
        used = dict.fromkeys(stage.devices for stage in draft.stages)
        kinds = {device.kind for device in request.cluster.devices}
        idle: list[Devices] = []
        for size in self._sizes:
            for kind in sorted(kinds):
                blocks = [
                    block
                    for block in self._blocks(size)
                    if request.cluster.devices[block[0]].kind == kind
                ]
                if blocks:
                    least = [(sum(busy_s[d] for d in block), block) for block in blocks]
                    idle.append(min(least)[1])
        may_be_on_all = self._sizes[-1] > 1 and (request.max_replicas or count) >= count
        if may_be_on_all and count not in self._sizes:
            idle.append(tuple(range(count)))
        known = dict.fromkeys([*idle, *used])
        self._known = sorted(known, key=lambda home: max(busy_s[device] for device in home))

    def busiest_first(self) -> list[int]:
        """The stages of the draft, those on the busiest device first."""
        busy_s, stages = self._busy_s, self._draft.stages
        most_s = [max(busy_s[device] for device in stage.devices) for stage in stages]
        return sorted(range(len(stages)), key=lambda number: -most_s[number])

    def others(self, stage: DraftStage) -> Iterator[Devices]:
        """Other devices for a stage: those known, and its own halved or doubled."""
        near = list(self._near(stage.devices))
        for devices in dict.fromkeys([*near, *self._known]):
            if devices != stage.devices:
                yield devices

    def _near(self, devices: Devices) -> Iterator[Devices]:
        """Either half of some devices, and the block of twice as many around them."""
        size = len(devices)
        if size > 1:
            yield devices[: size // 2]
            yield devices[size // 2 :]
        if 2 * size in self._sizes:
            first = devices[0] - devices[0] % (2 * size)
            if first + 2 * size <= self._count:
                yield tuple(range(first, first + 2 * size))

    def _blocks(self, size: int) -> Iterator[Devices]:
        for first in range(0, self._count - size + 1, size):
            yield tuple(range(first, first + size))
