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
from lightning_gpp.planner.graphpipe.place.homes import given_out


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
    by_size = sorted(range(len(stages)), key=lambda number: -stages[number].crew.num_replicas)
    kinds = [device.kind for device in request.cluster.devices]
    named = request.cluster.kinds
    wanted = [(named[one.crew.kind], one.crew.num_replicas) for one in stages]
    ways = given_out(wanted, kinds), given_out(wanted, kinds, by_size)
    return [
        Draft(
            tuple(
                DraftStage(one.units, own, parts * one.crew.multiple, one.recompute)
                for one, own in zip(stages, devices)
            ),
            count,
        ).reduced()
        for devices in dict.fromkeys(way for way in ways if way is not None)
    ]
