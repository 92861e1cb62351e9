"""Shorter questions to planners, for tests that fix the number of micro-batches."""

from __future__ import annotations

from typing import Any

from lightning_gpp.cluster import Cluster
from lightning_gpp.cost import Profile, estimate_profile
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner import Plan, make_plan


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
    costs = profile or estimate_profile(graph)
    return make_plan(
        graph,
        cluster or num_devices,
        planner=planner,
        costs=costs,
        minibatch_size=max(1, round(num_microbatches * costs.microbatch_size)),
        num_microbatches=num_microbatches,
        **options,
    )
