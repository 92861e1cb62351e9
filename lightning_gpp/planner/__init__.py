"""Plans: which operators form which stage on which device, and the planners that find them.

``base`` is the question, ``make_plan`` the planners by name: ``balanced``, ``data_parallel``,
``sequential``, ``graphpipe``, ``graphpipe_exclusive``, ``pipedream``, ``piper``.

Folders beside theirs: ``plan`` has plans as data, ``units`` the model as planners cut it,
``step_time`` how long a step takes.
"""

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.make_plan import (
    BALANCED,
    GRAPHPIPE,
    PLANNERS,
    answer,
    make_plan,
    plan_request,
)
from lightning_gpp.planner.plan.manual import resolve_plan
from lightning_gpp.planner.plan.plan import (
    Plan,
    Stage,
    load_plan,
    plan_from_json,
    plan_to_json,
    save_plan,
)
from lightning_gpp.planner.plan.plan_graph import PlanGraph, plan_graph, validate_plan
from lightning_gpp.planner.plan_to_run import num_devices_used
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, evaluate_plan

__all__ = [
    "BALANCED",
    "GRAPHPIPE",
    "PLANNERS",
    "Plan",
    "PlanEvaluation",
    "PlanGraph",
    "PlanRequest",
    "Stage",
    "answer",
    "evaluate_plan",
    "load_plan",
    "make_plan",
    "num_devices_used",
    "plan_from_json",
    "plan_graph",
    "plan_request",
    "plan_to_json",
    "resolve_plan",
    "save_plan",
    "validate_plan",
]
