"""Lower bounds of plans, as the climb asks for them before it plays a plan."""

from __future__ import annotations

from lightning_gpp.planner import Plan, PlanRequest
from lightning_gpp.planner.graphpipe.bounds import DraftBounds
from lightning_gpp.planner.graphpipe.draft import UnitTables, draft_of


def least_step_s(plan: Plan, request: PlanRequest) -> float:
    """Seconds that a step takes at least; 0 where a plan cuts what the climb keeps whole."""
    tables = UnitTables(request)
    draft = draft_of(plan, tables)
    return 0.0 if draft is None else DraftBounds(tables, is_chain=plan.is_chain).least_s(draft)
