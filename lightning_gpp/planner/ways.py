"""Pipeline of layers, graph parallelism, or both: how many ways, and the plan: stages × ways."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from lightning_gpp.graph.graph_parallel import WaysGraph
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.make_plan import answer
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, border_bytes, evaluate_plan


@dataclass(frozen=True)
class WaysAnswer:
    """A plan with a number of ways, the devices that divide the vertices of every chunk.

    Attributes:
        request: for the model in ways; its micro-batches are the chunks.
        model: the same model.
        plan: for it.
    """

    request: PlanRequest
    model: WaysGraph
    plan: Plan

    @cached_property
    def evaluation(self) -> PlanEvaluation:
        """Predicted time and memory of the plan; an epoch is a step."""
        return evaluate_plan(self.plan, self.request)

    @cached_property
    def message_bytes(self) -> float:
        """Bytes of activations and gradients that devices send in an epoch."""
        return border_bytes(self.plan, self.request)


def answer_ways(request: PlanRequest, model: WaysGraph, planner: str) -> WaysAnswer:
    """The plan for a number of ways.

    Args:
        request: for the model in ways.
        model: the same.
        planner: name of the planner that divides the layers.

    Raises:
        ValueError: the layers cannot be divided so.
    """
    plan = plan_in_ways(answer(first_way(request, model), planner), model)
    return WaysAnswer(request, model, plan)


def first_way(request: PlanRequest, model: WaysGraph) -> PlanRequest:
    """The question for one way: its branch alone, on the first device of those of all ways.

    Args:
        request: for the model in ways.
        model: the same.

    Raises:
        ValueError: the ways do not divide the devices.
    """
    if request.num_devices % model.num_ways:
        raise ValueError(f"{model.num_ways} ways do not divide {request.num_devices} devices")
    cluster = request.cluster.every(model.num_ways)
    return replace(request, graph=model.first_way(), cluster=cluster)


def plan_in_ways(plan: Plan, model: WaysGraph) -> Plan:
    """Every device of a plan becomes as many neighbouring devices as there are ways.

    What a way needs of others has to have come before it goes on, so a stage ends before every
    operator that reads rows of other ways. The last stage joins the outputs.

    Args:
        plan: for :meth:`~lightning_gpp.graph.graph_parallel.WaysGraph.first_way`, without replicas.
        model: in ways.

    Raises:
        ValueError: the plan has replicas.
    """
    num_ways = model.num_ways
    if num_ways == 1:
        return plan
    if any(stage.num_replicas > 1 for stage in plan.stages):
        raise ValueError(f"a plan for ways has no replicas, got {plan.planner!r}'s with some")
    stage_of = {model.operators[name][0]: s for s in plan.stages for name in s.operators}
    levels: dict[str, int] = {}
    members: dict[tuple[int, int, int], list[str]] = {}
    joins: list[str] = []
    for operator in model.graph:
        if operator.name not in model.operators:
            joins.append(operator.name)
            continue
        name, way = model.operators[operator.name]
        before = [levels[other] for other in model.graph.predecessors[operator.name]]
        level = levels[operator.name] = max(before, default=0) + model.exchanges(operator)
        members.setdefault((stage_of[name].id, level, way), []).append(operator.name)
    stages = [
        Stage(
            number,
            tuple(members[key]),
            (plan.stages[key[0]].devices[0] * num_ways + key[2],),
            recompute=plan.stages[key[0]].recompute,
        )
        for number, key in enumerate(sorted(members))
    ]
    if joins:
        last = plan.stages[-1].devices[0] * num_ways
        stages.append(Stage(len(stages), tuple(joins), (last,)))
    return replace(plan, stages=tuple(stages), is_chain=False)
