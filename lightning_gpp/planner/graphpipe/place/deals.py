"""Plans without any search: units dealt to equal groups of devices in depth-first order.

A plan is a map from units to groups of devices; its stages follow from it: units of one group that
wait for the same stages of other groups are one stage. So no unit waits for what it does not need,
and a join beside a branch is a stage of its own on the same devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_gpp.planner.graphpipe.place.draft import Draft, DraftStage, Units
from lightning_gpp.planner.graphpipe.place.unit_tables import UnitTables, places


def deals(tables: UnitTables) -> Iterator[Draft]:
    """Equal work for groups of 1, 2, 4, … devices, with every size of micro-batches."""
    request = tables.request
    for replicas in request.replica_counts(request.num_devices):
        num_groups = request.num_devices // replicas
        groups = equal_groups(tables, num_groups)
        pieces = followed(groups, tables)
        for size in request.microbatch_sizes:
            stages = [
                DraftStage(units, tuple(range(group * replicas, (group + 1) * replicas)), replicas)
                for group, units in pieces
            ]
            num_microbatches = round(request.minibatch_size / size) * replicas
            yield Draft(tuple(stages), num_microbatches)


def equal_groups(tables: UnitTables, num_groups: int) -> list[int]:
    """The group of every unit: the order cut into runs of equal work."""
    total_s = sum(tables.compute_s)
    groups, done_s = [], 0.0
    for unit_s in tables.compute_s:
        middle = (done_s + unit_s / 2) / total_s if total_s else 0.0
        groups.append(min(num_groups - 1, int(middle * num_groups)))
        done_s += unit_s
    return groups


def followed(groups: Sequence[int], tables: UnitTables) -> list[tuple[int, Units]]:
    """The stages of a map: (group, units) of each, none before those that it reads from.

    Args:
        groups: of every unit.
        tables: of the units.
    """
    waits: list[int] = []  # stages of other groups that a unit waits for, one bit each
    stage_of: list[int] = []
    stages: dict[tuple[int, int], int] = {}
    found: list[tuple[int, Units]] = []
    for at, group in enumerate(groups):
        above = 0
        for source in places(tables.needs[at]):
            above |= waits[source]
            if groups[source] != group:
                above |= 1 << stage_of[source]
        stage = stages.setdefault((group, above), len(stages))
        if stage == len(found):
            found.append((group, 0))
        found[stage] = group, found[stage][1] | 1 << at
        waits.append(above)
        stage_of.append(stage)
    return found
