from __future__ import annotations

import math

import pytest
from helpers.graphs import literal_graph
from helpers.planning import estimated

from lightning_gpp.cluster import cluster_preset, uniform_cluster
from lightning_gpp.cost import (
    ESTIMATED,
    Costs,
    OpProfile,
    Profile,
    estimate_costs,
    graph_work,
    with_estimates,
)
from lightning_gpp.graph import GraphInput, ModelGraph, OpNode, Parameter, TensorSpec, Value

GRAPH = literal_graph({"a": "x", "add()": "a x"})


def test_an_estimate_says_so():
    found = estimate_costs(GRAPH, uniform_cluster(2), 4)
    assert found.is_estimated and [*found.by_kind] == [ESTIMATED]


def test_costs_grow_with_the_bytes_that_are_touched():
    costs = estimated(GRAPH).operators
    tensor, weight = 4 * 16 * 4, 1000
    ratio = costs["a"].forward_s / costs["add"].forward_s
    assert ratio == pytest.approx((2 * tensor + weight) / (3 * tensor))
    assert costs["a"].backward_s == 2 * costs["a"].forward_s
    assert costs["a"].activation_bytes == tensor


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_costs_and_sizes_are_real_numbers(wrong):
    with pytest.raises(ValueError, match="costs must be numbers of at least 0, got OpProfile"):
        OpProfile(forward_s=1.0, backward_s=wrong)
    with pytest.raises(ValueError, match="microbatch_size must be above 0 samples"):
        Profile({}, microbatch_size=wrong)


def test_a_measured_profile_gives_the_flops_of_an_estimate():
    cluster = cluster_preset("dgx_a100", 2)
    (kind,) = cluster.kinds
    measured = Costs(
        tuple(
            Profile({n: OpProfile(9.0, 9.0, 70 * size, 5e15 * size) for n in ("a", "add")}, size)
            for size in (1, 2)
        )
    )
    guessed = estimate_costs(GRAPH, cluster, 8).at(8, kind).operators["a"]
    costs = with_estimates(measured, GRAPH, cluster, 8)
    assert [profile.microbatch_size for profile in costs.by_kind[kind]] == [1, 2, 4, 8]
    found = costs.at(8, kind).operators["a"]
    speed = cluster.device_kind(kind).flops_per_s("float32")
    assert found.forward_s == pytest.approx(8 * 5e15 / speed, rel=1e-3)
    assert found.activation_bytes == 560
    assert found.forward_s > 1e6 * guessed.forward_s


def test_of_a_table_only_the_rows_are_read():
    ids = Value("ids", (TensorSpec((4, 3), "int64", 0),))
    rows = Value("rows", (TensorSpec((4, 3, 8), "float32", 0),))
    table = OpNode("table", "table", "table", ("ids",), (rows,), ("table.weight",))
    graph = ModelGraph((GraphInput(ids),), (table,), ("rows",), (Parameter("table.weight", 10**9),))
    work = graph_work(graph)["table"]
    assert work.flops.at(4) == 0
    assert work.moved_bytes.at(4) == ids.size_bytes + 2 * rows.size_bytes
