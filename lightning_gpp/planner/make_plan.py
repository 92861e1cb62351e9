"""Planners by name, and the one function that the rest of the package calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_gpp.cluster import UNSPECIFIED_KIND, Cluster, uniform_cluster
from lightning_gpp.common.checks import check_whole
from lightning_gpp.common.without_collection import without_collection
from lightning_gpp.cost import ANY_DEVICE, ESTIMATED, Costs, Profile, estimate_costs, with_estimates
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner.base import Planner, PlanRequest
from lightning_gpp.planner.baselines.pipedream import pipedream
from lightning_gpp.planner.baselines.piper import piper
from lightning_gpp.planner.data_parallel import data_parallel
from lightning_gpp.planner.graphpipe.planner import (
    balanced,
    graphpipe,
    graphpipe_exclusive,
    sequential,
)
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.plan.plan_graph import validate_plan

GRAPHPIPE, BALANCED = "graphpipe", "balanced"
"""Who is asked by default, and by default for one graph."""

PLANNERS: Mapping[str, Planner] = {
    "balanced": balanced,
    "data_parallel": data_parallel,
    "graphpipe": graphpipe,
    "graphpipe_exclusive": graphpipe_exclusive,
    "pipedream": pipedream,
    "piper": piper,
    "sequential": sequential,
}
"""Planners by name. A new planner is a file with one function, and an entry here."""


def make_plan(
    graph: ModelGraph,
    cluster: Cluster | int,
    *,
    minibatch_size: int,
    planner: str = GRAPHPIPE,
    **options: Any,
) -> Plan:
    """Plans a model for a cluster.

    Args:
        graph: the model.
        cluster: the devices and links; a number stands for as many equal devices with the default
            link.
        minibatch_size: samples of one optimizer step.
        planner: name in :data:`PLANNERS`.
        options: those of :func:`plan_request`: ``costs``, ``num_microbatches``, ``schedule``, ….

    Raises:
        TypeError: an argument is of another type.
        ValueError: a name is unknown, or the model cannot be planned like this.
    """
    return answer(plan_request(graph, cluster, minibatch_size=minibatch_size, **options), planner)


def answer(request: PlanRequest, planner: str) -> Plan:
    """The valid plan of a planner.

    Args:
        request: the question.
        planner: name in :data:`PLANNERS`.

    Raises:
        ValueError: the name is unknown, or the model cannot be planned like this.
        RuntimeError: the plan cannot run, which is a fault of the planner.
    """
    if planner not in PLANNERS:
        raise ValueError(f"unknown planner {planner!r}; known planners: {', '.join(PLANNERS)}")
    with without_collection():
        plan = PLANNERS[planner](request)
    try:
        validate_plan(plan, request.graph, request.num_devices)
    except ValueError as error:
        raise RuntimeError(
            f"planner {planner!r} made a plan that cannot run ({error}); this is a fault of the "
            "planner, please report it with the model graph"
        ) from error
    return plan


def plan_request(
    graph: ModelGraph,
    cluster: Cluster | int,
    *,
    costs: Costs | Profile | None = None,
    schedule: str = "1f1b",
    minibatch_size: int,
    **options: Any,
) -> PlanRequest:
    """Builds the question to a planner, and checks it.

    Args:
        graph: the model.
        cluster: the devices and links; a number stands for as many equal devices with the default
            link.
        costs: costs of the operators. If missing, or unknown for a kind of device, they are
            estimated from sizes and data sheets, and the plan's ``planner`` says so.
        schedule: name of the schedule that will run the plan.
        minibatch_size: samples of one optimizer step.
        options: further attributes of a :class:`PlanRequest`: ``num_microbatches``,
            ``optimizer_values``, ``may_recompute``, ``max_replicas``, ``held_versions``.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a number makes no sense, or the costs do not belong to the graph.
    """
    costs = Costs((costs,)) if isinstance(costs, Profile) else costs
    for name, value, kinds in (
        ("graph", graph, (ModelGraph,)),
        ("cluster", cluster, (Cluster, int)),
        ("costs", costs, (Costs, type(None))),
    ):
        if not isinstance(value, kinds) or isinstance(value, bool):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"{name} must be of type {expected}, got a {type(value).__name__}")
    check_whole("minibatch_size", minibatch_size)
    if isinstance(cluster, int):
        if cluster < 1:
            raise ValueError(f"a cluster needs at least 1 device, got {cluster}")
        kind = ESTIMATED if costs is None else costs.profiles[0].device
        cluster = uniform_cluster(cluster, kind=UNSPECIFIED_KIND if kind == ANY_DEVICE else kind)
    if costs is None:
        costs = estimate_costs(graph, cluster, minibatch_size)
    else:
        _check_takes_time(costs)
        costs = with_estimates(costs, graph, cluster, minibatch_size)
    return PlanRequest(graph, cluster, costs, minibatch_size, **options).scheduled(schedule)


def _check_takes_time(costs: Costs) -> None:
    for profile in costs.profiles:
        operators = profile.operators.values()
        if operators and not any(each.forward_s or each.backward_s for each in operators):
            raise ValueError(
                f"the profile of {profile.device} at micro-batch size {profile.microbatch_size:g} "
                f"says 0 seconds for all of its {len(operators)} operators; a plan needs times: "
                "profile the model, or leave the costs out to have them estimated"
            )
