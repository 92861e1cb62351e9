"""Replicas that do the same, only later than one another: the last of them stands for all.

Replicas of a stage are *alike* if their devices are, if they exchange the same with replicas that
are alike, in the same order over the same links, and if the stages beside them on their devices
are alike, too. Messages leave one by one, to the first replica first, so of those that are alike
none does anything later than the last one: a step that is played with it alone takes as long, as
everything starts at the latest of what it waits for.

.. code-block:: text

    stage 0, 4 replicas     0  1  2  3        the loss keeps device 0 busy, so replicas 1 to 3 are
    stage 1, 4 replicas     0  1  2  3        alike in both stages: of each, 0 and 3 are played
    loss, beside 0          0
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from lightning_gpp.graph import FEED, StageEdge
from lightning_gpp.schedule.numbering import Exchange

Devices = tuple[int, ...]


class Flow(NamedTuple):
    """The messages of an edge, in one direction.

    Attributes:
        edge: the edge.
        exchanges: its messages.
        source: the stage that sends.
        target: the stage that receives.
        is_gradient: whether they go back.
    """

    edge: StageEdge
    exchanges: Sequence[Exchange]
    source: int
    target: int
    is_gradient: bool = False

    @property
    def is_fed(self) -> bool:
        """Whether they are inputs of the model."""
        return self.source == FEED


def stand_ins(
    devices: Sequence[Devices],
    kinds: Sequence[Sequence[Hashable]],
    flows: Sequence[Flow],
    link: Callable[[int, int], Hashable],
) -> list[list[int]]:
    """The replica that stands for each replica of every stage: one that is alike, or itself.

    Args:
        devices: of every stage.
        kinds: of every stage what each replica computes, and on which kind of device.
        flows: what stages send to each other.
        link: that joins two devices.
    """
    near: list[list[list[tuple[int, int, Hashable]]]] = [[[] for _ in home] for home in devices]
    residents: dict[int, list[tuple[int, int]]] = {}
    for number, flow in enumerate(flows):
        for one in flow.exchanges:
            ends = (flow.source, one.sender), (flow.target, one.receiver)
            there = link(*(devices[stage][replica] for stage, replica in ends))
            for is_sent, (own, other) in enumerate((ends, ends[::-1])):
                if own[0] != FEED:
                    near[own[0]][own[1]].append((*other, (is_sent, number, id(one.each), there)))
    for stage, home in enumerate(devices):
        for replica, device in enumerate(home):
            residents.setdefault(device, []).append((stage, replica))
    for some in residents.values():
        for own in some if len(some) > 1 else ():
            near[own[0]][own[1]] += [(*other, "beside") for other in some if other != own]
    alike = [[0] * len(home) for home in devices]
    several = [stage for stage, home in enumerate(devices) if len(home) > 1]
    is_settled = False
    while not is_settled:
        is_settled = True
        for stage in (*reversed(several), *several):
            groups: dict[Hashable, int] = {}
            changed = [
                groups.setdefault((kind, *[(what, alike[s][r]) for s, r, what in own]), len(groups))
                for kind, own in zip(kinds[stage], near[stage])
            ]
            is_settled &= changed == alike[stage]
            alike[stage] = changed
    lasts = [{group: replica for replica, group in enumerate(own)} for own in alike]
    found = [[last[group] for group in own] for last, own in zip(lasts, alike)]
    for some in residents.values():  # the last ones have to be beside each other
        if len({found[stage][replica] == replica for stage, replica in some}) > 1:
            return [[*range(len(home))] for home in devices]
    return found
