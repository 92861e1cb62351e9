"""The stages of a draft in an order in which they may be numbered."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpp.planner.graphpipe.place.draft import DraftStage, Units
from lightning_gpp.planner.graphpipe.place.unit_tables import UnitTables
from lightning_gpp.planner.units.dag import order_to_end


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
    users: dict[int, set[int]] = {number: set() for number in range(len(stages))}
    for target, needed in enumerate(sources):
        for source, stage in enumerate(stages):
            if stage.units & needed:
                users[source].add(target)
    ends = (number for number in users if stages[number].units & makers or not makers)
    order = order_to_end(users, ends)
    return None if order is None else tuple([stages[number] for number in order])


def _are_in_order(stages: Sequence[DraftStage], sources: Sequence[Units]) -> bool:
    """Whether none comes before one that it reads from: most moves leave it at that."""
    behind = 0
    for stage, needed in zip(reversed(stages), reversed(sources)):
        if needed & behind:
            return False
        behind |= stage.units
    return True
