"""Shorter questions to planners, for tests that fix the number of micro-batches."""

from __future__ import annotations

from typing import Any

from lightning_gpp.cluster import Cluster
from lightning_gpp.cost import Profile, graph_work, roofline_costs
from lightning_gpp.cost.estimate import NOMINAL_KIND
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner import Plan, PlanEvaluation, evaluate_plan, make_plan, plan_request


def estimated(graph: ModelGraph) -> Profile:
    """Costs from sizes alone, at the size that the graph was captured with."""
    works = graph_work(graph)
    return roofline_costs(works, [NOMINAL_KIND], [graph.microbatch_size]).profiles[0]


def balanced_plan(
    graph: ModelGraph,
    *,
    num_devices: int,
    num_microbatches: int,
    profile: Profile | None = None,
    cluster: Cluster | None = None,
    planner: str = "balanced",
    **options: Any,
) -> Plan:
    """The plan of ``balanced`` with micro-batches of the size of the profile."""
    costs = profile or estimated(graph)
    return make_plan(
        graph,
        cluster or num_devices,
        planner=planner,
        costs=costs,
        minibatch_size=max(1, round(num_microbatches * costs.microbatch_size)),
        num_microbatches=num_microbatches,
        **options,
    )


def evaluated(
    plan: Plan,
    graph: ModelGraph,
    *,
    profile: Profile,
    num_microbatches: int,
    schedule: str = "1f1b",
    cluster: Cluster | None = None,
) -> PlanEvaluation:
    """What a plan would do with micro-batches of the size of the profile."""
    request = plan_request(
        graph,
        cluster or plan.num_devices,
        costs=profile,
        minibatch_size=round(num_microbatches * profile.microbatch_size),
        num_microbatches=num_microbatches,
        schedule=schedule,
    )
    return evaluate_plan(plan, request)
