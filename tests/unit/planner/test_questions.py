"""Questions that make no sense are refused before anything is searched."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from helpers.graphs import literal_graph

from lightning_gpp import make_plan
from lightning_gpp.cluster import Cluster, Device, Link, cluster_preset
from lightning_gpp.cost import Costs, OpProfile, Profile
from lightning_gpp.graph import ModelGraph, Parameter, TensorSpec
from lightning_gpp.planner import answer, evaluate_plan
from lightning_gpp.planner.make_plan import plan_request
from lightning_gpp.reports.plan.describe import describe_plan
from lightning_gpp.workloads import WORKLOADS, mmt

GRAPH = literal_graph({"a": "x", "b": "a"})
SECONDS = Profile({"a": OpProfile(1e-3), "b": OpProfile(0.0)}, 4)
NOTHING = {"a": OpProfile(0.0, 0.0, 8), "b": OpProfile(0.0)}


def ask(**changes: Any) -> object:
    options: dict[str, Any] = {"graph": GRAPH, "cluster": 2, "minibatch_size": 16}
    options |= changes
    return make_plan(options.pop("graph"), options.pop("cluster"), **options)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"minibatch_size": 0}, "minibatch_size must be at least 1, got 0"),
        ({"minibatch_size": 1.5}, r"minibatch_size must be a whole number .*got 1\.5"),
        ({"num_microbatches": 0}, "num_microbatches must be at least 1, got 0"),
        ({"num_microbatches": 17}, "num_microbatches can be at most 16 for 16 samples, got 17"),
        (
            {"num_microbatches": 10**9, "minibatch_size": 10**9},
            "num_microbatches can be at most 1048576 for 1000000000 samples",
        ),
        ({"max_replicas": 1.5}, r"max_replicas must be a whole number .*got 1\.5"),
        ({"optimizer_values": -1}, "optimizer_values must be at least 0, got -1"),
        ({"cluster": 0}, "a cluster needs at least 1 device, got 0"),
        ({"planner": "zz"}, "unknown planner 'zz'; known planners: balanced, data_parallel, "),
        ({"schedule": "zz"}, "unknown schedule 'zz'"),
        ({"graph": ModelGraph((), (), ())}, "the model has no operator"),
        (
            {"costs": Profile(NOTHING, 4)},
            "the profile of cpu at micro-batch size 4 says 0 seconds for all of its 2 operators",
        ),
        (
            {"costs": Costs((SECONDS, replace(SECONDS, operators=NOTHING, microbatch_size=8)))},
            "the profile of cpu at micro-batch size 8 says 0 seconds for all of its 2 operators",
        ),
    ],
)
def test_numbers_and_names(changes, match):
    with pytest.raises(ValueError, match=match):
        ask(**changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"graph": mmt()}, "graph must be of type ModelGraph, got a Workload"),
        ({"cluster": "summit"}, "cluster must be of type Cluster or int, got a str"),
        ({"cluster": True}, "cluster must be of type Cluster or int, got a bool"),
        ({"costs": "costs.json"}, "costs must be of type Costs or NoneType, got a str"),
    ],
)
def test_types_that_are_mistaken(changes, match):
    with pytest.raises(TypeError, match=match):
        ask(**changes)


def test_a_profile_that_was_disturbed_can_still_be_planned_with():
    """Other processes had slowed down all operators while micro-batches of 2 were measured."""
    profiles = [
        Profile({name: OpProfile(seconds, 2 * seconds) for name in "ab"}, size)
        for size, seconds in ((1, 1e-5), (2, 9e-5), (4, 2e-5))
    ]
    request = plan_request(GRAPH, 2, minibatch_size=8, costs=Costs(tuple(profiles)))
    evaluation = evaluate_plan(answer(request, "graphpipe"), request)
    assert evaluation.step_s > 2e-5
    assert "samples/s" in describe_plan(evaluation, request)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0, -1, 1e-320, "fast", True])
def test_links_have_a_real_bandwidth(wrong):
    with pytest.raises(ValueError, match="a link needs a bandwidth above 0"):
        Link(wrong)


def test_sizes_of_tensors():
    with pytest.raises(ValueError, match=r"sizes cannot be negative, got shape \[4, -1\]"):
        TensorSpec((4, -1), "float32", 0)
    for wrong in (1, -1):
        with pytest.raises(ValueError, match=rf"batch_dim must be .*\[4\], got {wrong}"):
            TensorSpec((4,), "float32", wrong)
    with pytest.raises(ValueError, match="the size of parameter 'w' cannot be negative, got -4"):
        Parameter("w", -4)


def test_names_are_not_empty():
    with pytest.raises(ValueError, match="an operator or value has an empty name"):
        literal_graph({"": "x"})


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("mmt", {"num_branches": 0}, "num_branches must be at least 1, got 0"),
        ("mmt", {"num_branches": "4"}, "num_branches must be a whole number .*got '4'"),
        ("mmt", {"layers_per_branch": -3}, "layers_per_branch must be at least 1, got -3"),
        ("dlrm", {"num_dense": 0, "num_sparse": 0}, "at least one branch, got none"),
        ("dlrm", {"num_dense": -1}, "num_dense must be at least 0, got -1"),
        ("transformer", {"num_layers": 0}, "num_layers must be at least 1, got 0"),
    ],
)
def test_models_of_papers_have_parts(name, options, match):
    with pytest.raises(ValueError, match=match):
        WORKLOADS[name](**options)


@pytest.mark.parametrize("wrong", [0, -1, 1.5])
def test_devices_have_memory(wrong):
    with pytest.raises(ValueError, match="memory_bytes of device 'a' must be"):
        Cluster((Device("a", memory_bytes=wrong),))


def test_memory_may_be_written_with_an_exponent():
    assert cluster_preset("uniform", memory_bytes=16e9).devices[0].memory_bytes == 16 * 10**9
    with pytest.raises(ValueError, match="memory_bytes must be a whole number"):
        cluster_preset("uniform", memory_bytes=1.5)
