"""From plans to drafts and back."""

from __future__ import annotations

from lightning_gpp.planner.graphpipe.place.draft import Draft, DraftStage
from lightning_gpp.planner.graphpipe.place.unit_tables import UnitTables
from lightning_gpp.planner.plan.plan import Plan, Stage


def draft_of(plan: Plan, tables: UnitTables) -> Draft | None:
    """The draft of a plan, without the order of a chain; None where a stage divides a unit."""
    stages = []
    for one in plan.stages:
        units = tables.units_of(one.operators)
        taken = one.devices, one.microbatch_multiple, one.recompute, one.shares
        stages.append(DraftStage(units, *taken))
    if sum(stage.units for stage in stages) != tables.everything:
        return None
    assert plan.num_microbatches is not None  # planners say so
    return Draft(tuple(stages), plan.num_microbatches).reduced()


def plan_of(draft: Draft, tables: UnitTables, name: str, *, is_chain: bool = False) -> Plan:
    """The plan of a draft whose stages are in topological order.

    Args:
        draft: the draft.
        tables: of its units.
        name: of the planner.
        is_chain: whether every stage waits for the one before it.
    """
    stages = tuple(
        Stage(number, tables.operators(stage.units), *stage[1:])
        for number, stage in enumerate(draft.stages)
    )
    return Plan(stages, name, draft.num_microbatches, is_chain)
