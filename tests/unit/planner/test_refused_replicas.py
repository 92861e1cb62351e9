"""Plans of published planners whose replicas could not exchange their values."""

from __future__ import annotations

import sys

import pytest
from helpers.graphs import literal_graph, profile_of

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.cost import Costs
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner import Plan, PlanRequest, Stage, answer, make_plan
from lightning_gpp.planner.make_plan import PLANNERS

MAKE_PLAN = sys.modules["lightning_gpp.planner.make_plan"]


def heavy(*, unbatched: bool) -> ModelGraph:
    """x ─> light ─> heavy ─> end; replicas of heavy alone are what the baselines want."""
    operators = {"light": "x", "heavy": "light", "end": "heavy"}
    return literal_graph(operators, unbatched=["light", "heavy"] if unbatched else [])


def request(graph: ModelGraph, num_microbatches: int = 1, end_s: float = 1e-2, **options):
    """Three devices and links that cost nothing; of one micro-batch replicas must have shares."""
    cluster = Cluster(tuple(Device(str(i)) for i in range(3)), Link(bandwidth_bytes_per_s=1e15))
    costs = Costs((profile_of(graph, {"light": 1e-9, "heavy": 1e-2, "end": end_s}),))
    return PlanRequest(graph, cluster, costs, 8, num_microbatches, **options)


def test_a_baseline_goes_without_replicas_that_cannot_run():
    free = answer(request(heavy(unbatched=False)), "pipedream")
    assert max(stage.num_replicas for stage in free.stages) > 1
    found = answer(request(heavy(unbatched=True)), "pipedream")
    assert {stage.num_replicas for stage in found.stages} == {1}


@pytest.mark.parametrize("planner", ["pipedream", "piper"])
def test_replicas_that_take_turns_are_kept(planner):
    """Whole micro-batches are not cut, so these plans can run."""
    plan = answer(request(heavy(unbatched=True), num_microbatches=4, end_s=1e-9), planner)
    assert plan.planner == planner
    assert {stage.microbatch_multiple for stage in plan.stages} == {1, 2}
    assert all(set(stage.replica_multiples) == {1} for stage in plan.stages)


@pytest.mark.parametrize("planner", sorted(PLANNERS))
def test_an_invalid_plan_is_a_fault_of_its_planner(planner, monkeypatch):
    """Also one with replicas is not made again without them."""
    graph = heavy(unbatched=True)
    cut = Plan((Stage(0, ("light",), (0,), 2), Stage(1, ("heavy", "end"), (1, 2), 2)), planner, 2)
    one = {planner: lambda _: cut}
    monkeypatch.setattr(MAKE_PLAN, "PLANNERS", one)
    with pytest.raises(RuntimeError, match=f"planner '{planner}' made a plan that cannot run") as e:
        make_plan(graph, 3, minibatch_size=8, planner=planner)
    assert "'light' goes from stage 0" in str(e.value) and "fault of the planner" in str(e.value)
