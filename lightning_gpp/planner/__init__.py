"""Plans: which operators form which stage on which device, and the planners that find them.

``base`` is the question, ``make_plan`` the planners by name: ``balanced``, ``data_parallel``,
``sequential``, ``graphpipe``, ``graphpipe_exclusive``, ``pipedream``, ``piper``.

Folders beside theirs: ``plan`` has plans as data, ``units`` the model as planners cut it,
``step_time`` how long a step takes.
"""

from lightning_gpp.planner.base import Planner, PlanRequest
from lightning_gpp.planner.baselines.best_plan import refusal_notes
from lightning_gpp.planner.make_plan import (
    BALANCED,
    GRAPHPIPE,
    PLANNERS,
    answer,
    ask,
    make_plan,
    plan_request,
)
from lightning_gpp.planner.plan.by_rank import by_rank
from lightning_gpp.planner.plan.manual import PlanLike, resolve_plan
from lightning_gpp.planner.plan.plan import (
    Plan,
    Stage,
    load_plan,
    plan_from_json,
    plan_to_json,
    save_plan,
)
from lightning_gpp.planner.plan.plan_graph import PlanGraph, plan_graph, validate_plan
from lightning_gpp.planner.plan_to_run import (
    PlanQuestion,
    PlanToRun,
    num_devices_used,
    on_all_devices,
    plan_to_run,
)
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, evaluate_below, evaluate_plan
from lightning_gpp.planner.units.units import num_separable
from lightning_gpp.planner.ways import first_way, plan_in_ways

__all__ = [
    "BALANCED",
    "GRAPHPIPE",
    "PLANNERS",
    "Plan",
    "PlanEvaluation",
    "PlanGraph",
    "PlanLike",
    "PlanQuestion",
    "PlanRequest",
    "PlanToRun",
    "Planner",
    "Stage",
    "answer",
    "ask",
    "by_rank",
    "evaluate_below",
    "evaluate_plan",
    "first_way",
    "load_plan",
    "make_plan",
    "num_devices_used",
    "num_separable",
    "on_all_devices",
    "plan_from_json",
    "plan_graph",
    "plan_in_ways",
    "plan_request",
    "plan_to_json",
    "plan_to_run",
    "refusal_notes",
    "resolve_plan",
    "save_plan",
    "validate_plan",
]
