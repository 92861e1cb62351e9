"""Stages that a search found, on devices.

Devices are given out in the order of the stages, so that those of a branch are neighbours in the
cluster and what they exchange stays in a host; a second way gives the stages with most replicas the
first choice, so that their groups do not lie across hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.graphpipe.candidates.found_stage import FoundStage
from lightning_gpp.planner.graphpipe.place.draft import Draft, DraftStage

Devices = tuple[int, ...]


def placed(
    stages: Sequence[FoundStage], microbatch_size: float, request: PlanRequest
) -> list[Draft]:
    """Stages with their devices given out in different ways.

    Args:
        stages: the stages in the order of their places.
        microbatch_size: samples of the smallest micro-batch, of which replicas may share one.
        request: the question.
    """
    parts = max(-(-stage.crew.num_replicas // stage.crew.multiple) for stage in stages)
    count = round(request.minibatch_size / microbatch_size) * parts
    turns = range(len(stages))
    by_size = sorted(turns, key=lambda number: -stages[number].crew.num_replicas)
    ways = _given_out(stages, turns, request), _given_out(stages, by_size, request)
    return [
        Draft(
            tuple(
                DraftStage(one.units, own, parts * one.crew.multiple, one.recompute)
                for one, own in zip(stages, devices)
            ),
            count,
        ).reduced()
        for devices in dict.fromkeys(ways)
    ]


def _given_out(
    stages: Sequence[FoundStage], turns: Sequence[int], request: PlanRequest
) -> tuple[Devices, ...]:
    cluster = request.cluster
    free = {
        kind: [i for i, device in enumerate(cluster.devices) if device.kind == name]
        for kind, name in enumerate(cluster.kinds)
    }
    devices: dict[int, Devices] = {}
    for number in turns:
        crew = stages[number].crew
        devices[number] = tuple(free[crew.kind][: crew.num_replicas])
        del free[crew.kind][: crew.num_replicas]
    return tuple(devices[number] for number in range(len(stages)))
