"""Planners by name, and the one function that the rest of the package calls."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lightning_gpp.cluster import Cluster, uniform_cluster
from lightning_gpp.cost import Profile, estimate_profile
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner.balanced import balanced
from lightning_gpp.planner.base import Planner, PlanRequest
from lightning_gpp.planner.plan import Plan
from lightning_gpp.planner.validate import validate_plan

PLANNERS: Mapping[str, Planner] = MappingProxyType({"balanced": balanced})
"""Planners by name. A new planner is a file with one function, and an entry here."""


def make_plan(
    graph: ModelGraph,
    *,
    num_devices: int,
    planner: str = "balanced",
    profile: Profile | None = None,
    num_microbatches: int,
    schedule: str = "1f1b",
    cluster: Cluster | None = None,
) -> Plan:
    """Plans a model for a number of devices.

    Args:
        graph: the model.
        num_devices: devices to use; every one gets a stage.
        planner: name in :data:`PLANNERS`.
        profile: measured costs of the operators. Without one they are estimated from sizes, and
            the plan's ``planner`` says so.
        num_microbatches: micro-batches of a mini-batch.
        schedule: name of the schedule that will run the plan.
        cluster: the devices and links; equal devices with the default link if not given.

    Raises:
        ValueError: a name is unknown, or the model cannot be planned like this.
    """
    if planner not in PLANNERS:
        raise ValueError(f"unknown planner {planner!r}; known planners: {', '.join(PLANNERS)}")
    if num_devices < 1:
        raise ValueError(f"num_devices must be at least 1, got {num_devices}")
    if cluster is not None and cluster.num_devices != num_devices:
        raise ValueError(
            f"num_devices is {num_devices}, but the cluster has {cluster.num_devices} devices; "
            "give the same number, or leave the cluster out"
        )
    request = PlanRequest(
        graph=graph,
        cluster=cluster or uniform_cluster(num_devices),
        profile=profile or estimate_profile(graph),
        num_microbatches=num_microbatches,
        schedule=schedule,
    )
    plan = PLANNERS[planner](request)
    validate_plan(plan, graph, num_devices)
    return plan
