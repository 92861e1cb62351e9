"""Plans: which operators form which stage on which device."""

from lightning_gpp.planner.make_plan import PLANNERS, make_plan
from lightning_gpp.planner.manual import resolve_plan
from lightning_gpp.planner.plan import Plan, Stage
from lightning_gpp.planner.validate import validate_plan

__all__ = ["PLANNERS", "Plan", "Stage", "make_plan", "resolve_plan", "validate_plan"]
