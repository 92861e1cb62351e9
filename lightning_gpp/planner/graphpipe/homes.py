"""The groups of devices that stages of a draft may move to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from lightning_gpp.planner.graphpipe.draft import Draft, DraftStage, UnitTables

Devices = tuple[int, ...]


class Homes:
    """Groups of devices for a draft: those that it has, and the least busy blocks of every size.

    A block of ``r`` devices begins at a multiple of ``r``, so that blocks of one size do not
    overlap and those of hosts stay within them.

    Args:
        draft: the draft.
        tables: of its units.

    Attributes:
        tables: of its units.
        may_share: whether two stages may have devices in common.
    """

    may_share = True

    def __init__(self, draft: Draft, tables: UnitTables) -> None:
        self.tables = tables
        self._request, self._draft = tables.request, draft
        self._count = self._request.num_devices
        self._sizes = self._request.replica_counts(self._count)
        self._busy_s = [0.0] * self._count
        for stage in draft.stages:
            for device in stage.devices:
                self._busy_s[device] += tables.seconds(stage.units) / stage.num_replicas

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

    def pairs(self, stage: DraftStage) -> Iterator[tuple[Devices, Devices]]:
        """Devices for the two parts of a stage that is cut, different ones."""
        for devices in self.others(stage):
            yield stage.devices, devices

    def together(self, stage: DraftStage, other: DraftStage) -> Iterator[Devices]:
        """Devices for two stages as one, beside those of either."""
        yield from ()

    @cached_property
    def _known(self) -> list[Devices]:
        """The least busy block of every size and kind, all devices, and the groups of the draft."""
        idle: list[Devices] = []
        for size in self._sizes:
            for kind in sorted(self._request.cluster.kinds):
                blocks = [block for block in self._blocks(size) if self._kind(block[0]) == kind]
                if blocks:
                    least = [(sum(self._busy_s[d] for d in block), block) for block in blocks]
                    idle.append(min(least)[1])
        most = self._request.max_replicas or self._count
        if self._sizes[-1] > 1 and most >= self._count and self._count not in self._sizes:
            idle.append(tuple(range(self._count)))
        known = dict.fromkeys([*idle, *(stage.devices for stage in self._draft.stages)])
        return sorted(known, key=lambda home: max(self._busy_s[device] for device in home))

    def _near(self, devices: Devices) -> Iterator[Devices]:
        """Either half of some devices, and the block of twice as many around them."""
        size = len(devices)
        yield from halves(devices)
        if 2 * size in self._sizes:
            first = devices[0] - devices[0] % (2 * size)
            if first + 2 * size <= self._count:
                yield tuple(range(first, first + 2 * size))

    def _blocks(self, size: int) -> Iterator[Devices]:
        for first in range(0, self._count - size + 1, size):
            yield tuple(range(first, first + size))

    def _kind(self, device: int) -> str:
        return self._request.cluster.devices[device].kind


def halves(devices: Devices) -> Iterator[Devices]:
    """Either half of some devices; none of a single one."""
    half = len(devices) // 2
    if half:
        yield devices[:half]
        yield devices[half:]


def given_out(
    wanted: Sequence[tuple[str, int]],
    devices_of: Mapping[str, Sequence[int]],
    turns: Sequence[int] = (),
) -> tuple[Devices, ...] | None:
    """Devices of a kind and a number each, the first ones for the first; None if there are too few.

    Args:
        wanted: kinds and numbers.
        devices_of: kind -> all devices of it.
        turns: in which order devices are given out; in that of ``wanted`` if not given.
    """
    taken, found = dict.fromkeys(devices_of, 0), dict[int, Devices]()
    for number in turns or range(len(wanted)):
        kind, size = wanted[number]
        found[number] = tuple(devices_of[kind][taken[kind] : taken[kind] + size])
        if len(found[number]) < size:
            return None
        taken[kind] += size
    return tuple([found[number] for number in range(len(wanted))])


class OwnHomes(Homes):
    """Groups of idle devices, and the stage's own: no two stages share a device."""

    may_share = False

    def pairs(self, stage: DraftStage) -> Iterator[tuple[Devices, Devices]]:
        """A half of its devices for either part, or idle ones for one of them."""
        if stage.num_replicas > 1:
            first, second = halves(stage.devices)
            yield first, second
        for devices in self._known:
            yield stage.devices, devices

    def together(self, stage: DraftStage, other: DraftStage) -> Iterator[Devices]:
        """The devices of both, where these are as many of one kind."""
        both = tuple(sorted((*stage.devices, *other.devices)))
        is_even = stage.num_replicas == other.num_replicas and len(both) in self._sizes
        if is_even and len(set(map(self._kind, both))) == 1:
            yield both

    def _near(self, devices: Devices) -> Iterator[Devices]:
        """Either half of some devices, and twice as many, with the next idle ones of their kind."""
        yield from halves(devices)
        size = len(devices)
        idle = [one for one in self._idle if self._kind(one) == self._kind(devices[0])]
        if 2 * size in self._sizes and len(idle) >= size:
            near = sorted(idle, key=lambda one: abs(one - devices[0]))
            yield tuple(sorted((*devices, *near[:size])))

    @cached_property
    def _idle(self) -> list[int]:
        used = {device for stage in self._draft.stages for device in stage.devices}
        return [device for device in range(self._count) if device not in used]

    @cached_property
    def _known(self) -> list[Devices]:
        """The first idle devices, of every number and kind."""
        found = []
        for kind in sorted(self._request.cluster.kinds):
            idle = [device for device in self._idle if self._kind(device) == kind]
            found += [tuple(idle[:size]) for size in self._sizes if size <= len(idle)]
        return found
