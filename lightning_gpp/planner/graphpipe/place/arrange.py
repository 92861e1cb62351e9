"""The stages of a draft in an order in which they may be numbered."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from lightning_gpp.planner.graphpipe.place.draft import DraftStage, Units
from lightning_gpp.planner.graphpipe.place.unit_tables import UnitTables


def arranged(stages: Sequence[DraftStage], tables: UnitTables) -> tuple[DraftStage, ...] | None:
    """The stages in topological order, as close to the given one as can be.

    The last one makes an output of the model, and nobody reads from it.

    Args:
        stages: stages that hold all units, in any order.
        tables: of their units.

    Returns:
        None where stages wait for each other in a circle, or none can be last.
    """
    sources = [tables.sources(stage.units) for stage in stages]
    makers = tables.makers
    if (stages[-1].units & makers or not makers) and _are_in_order(stages, sources):
        return tuple(stages)
    users: list[list[int]] = [[] for _ in stages]
    missing = [0] * len(stages)
    for target, needed in enumerate(sources):
        above = [number for number, stage in enumerate(stages) if stage.units & needed]
        missing[target] = len(above)
        for source in above:
            users[source].append(target)
    ends = [
        number
        for number, stage in enumerate(stages)
        if not users[number] and (stage.units & makers or not makers)
    ]
    if not ends:
        return None
    last = ends[-1]
    ready = [number for number, count in enumerate(missing) if not count]
    order: list[int] = []
    while ready:
        number = heapq.heappop(ready)
        if number != last:
            order.append(number)
            for target in users[number]:
                missing[target] -= 1
                if not missing[target]:
                    heapq.heappush(ready, target)
    if len(order) + 1 < len(stages):
        return None
    return tuple([stages[number] for number in (*order, last)])


def _are_in_order(stages: Sequence[DraftStage], sources: Sequence[Units]) -> bool:
    """Whether none comes before one that it reads from: most moves leave it at that."""
    behind = 0
    for stage, needed in zip(reversed(stages), reversed(sources)):
        if needed & behind:
            return False
        behind |= stage.units
    return True
