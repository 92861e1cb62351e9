"""The groups of devices that stages of a draft may go to where they own their devices."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from lightning_gpp.planner.graphpipe.place.draft import DraftStage
from lightning_gpp.planner.graphpipe.place.homes import Devices, Homes, halves


class OwnHomes(Homes):
    """Groups of idle devices, and what a stage has itself: so no two stages share a device."""

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
