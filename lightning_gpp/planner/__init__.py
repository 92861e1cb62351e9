"""Plans, and the planners that find them.

``base`` is the question, ``make_plan`` the planners by name: ``balanced``, ``data_parallel``,
``sequential``, ``graphpipe``, ``graphpipe_exclusive``, ``pipedream``, ``piper``.

Folders beside theirs: ``plan`` has plans as data, ``units`` the model as planners cut it,
``step_time`` how long a step takes.
"""

from lightning_gpp.planner.base import PlanRequest as PlanRequest
from lightning_gpp.planner.make_plan import BALANCED as BALANCED
from lightning_gpp.planner.make_plan import GRAPHPIPE as GRAPHPIPE
from lightning_gpp.planner.make_plan import PLANNERS as PLANNERS
from lightning_gpp.planner.make_plan import answer as answer
from lightning_gpp.planner.make_plan import make_plan as make_plan
from lightning_gpp.planner.make_plan import plan_request as plan_request
from lightning_gpp.planner.plan.manual import resolve_plan as resolve_plan
from lightning_gpp.planner.plan.plan import Plan as Plan
from lightning_gpp.planner.plan.plan import Stage as Stage
from lightning_gpp.planner.plan.plan import load_plan as load_plan
from lightning_gpp.planner.plan.plan import plan_to_json as plan_to_json
from lightning_gpp.planner.plan.plan import save_plan as save_plan
from lightning_gpp.planner.plan.plan_graph import PlanGraph as PlanGraph
from lightning_gpp.planner.plan.plan_graph import plan_graph as plan_graph
from lightning_gpp.planner.plan.plan_graph import validate_plan as validate_plan
from lightning_gpp.planner.plan_to_run import num_devices_used as num_devices_used
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation as PlanEvaluation
from lightning_gpp.planner.step_time.evaluate import evaluate_plan as evaluate_plan
