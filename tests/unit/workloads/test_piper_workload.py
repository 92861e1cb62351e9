from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from helpers.published import piper_document, shared_graph, write_piper

import lightning_gpp
from lightning_gpp.cost import OpProfile
from lightning_gpp.workloads import Workload
from lightning_gpp.workloads.piper import read_piper_instance

DOCUMENT = piper_document()


def read(path: Path, **options: Any) -> Workload:
    return lightning_gpp.read_piper_workload(path, **({"time_unit_s": 1e-3} | options))


def test_graph_costs_and_units(tmp_path):
    workload = read(write_piper(tmp_path / "w.json", DOCUMENT))
    graph = workload.graph
    assert [o.name for o in graph] == ["a", "b", "c"]
    assert graph.predecessors["c"] == ("a", "b")
    assert {name: v.size_bytes for name, v in graph.values.items()} == {
        "samples": 0,
        "a_out": 1_000_000,
        "b_out": 2_000_000,
        "c_out": 0,
    }
    costs = workload.costs.at(2).operators  # two samples; recomputation tells the forward
    assert costs["b"] == pytest.approx(OpProfile(4e-3, 8e-3, 200_000_000))
    assert graph.parameter["a.weight"].size_bytes == 4_000_000
    assert workload.minibatch_size(2) == 32


def test_a_sample_may_stand_for_several(tmp_path):
    path = write_piper(tmp_path / "w.json", DOCUMENT)
    workload = read(path, samples=100)
    assert workload.graph.microbatch_size == 100
    assert workload.costs.at(50).operators["a"].forward_s == pytest.approx(0.5e-3)


def test_results_of_different_sizes_are_different_values(tmp_path):
    path = write_piper(tmp_path / "w.json", DOCUMENT, "edges", 2, "communicationCost", value=5e5)
    graph = read(path).graph
    assert [value.name for value in graph.operator["a"].outputs] == ["a_out", "a_out1"]
    assert graph.operator["c"].inputs == ("a_out1", "b_out")


def test_the_instance_keeps_every_way(tmp_path):
    instance = read_piper_instance(write_piper(tmp_path / "w.json", DOCUMENT), time_unit_s=1e-3)
    assert len(instance.operators[1].ways) == 2
    assert instance.operators[1].ways[1].seconds_per_sample == pytest.approx(8e-3)
    assert (instance.num_samples, instance.bandwidth_bytes_per_s) == (64, 1e10)


def test_the_unit_of_time_has_to_be_given(tmp_path):
    path = write_piper(tmp_path / "w.json", DOCUMENT)
    for unit_s in (None, 0, "ms"):
        with pytest.raises(ValueError, match=r"give time_unit_s, its seconds .*got"):
            lightning_gpp.read_piper_workload(path, time_unit_s=unit_s)
    usual, other = (read(path, time_unit_s=unit_s).costs.at(1) for unit_s in (1e-3, 1.0))
    assert other.operators["a"].forward_s == pytest.approx(1e3 * usual.operators["a"].forward_s)


TMPC = ("nodes", 1, "TMPCs", "1", 0)


@pytest.mark.parametrize(
    ("place", "value", "match"),
    [
        (("nodes",), KeyError, r"w.json: key 'nodes' is missing; expected an array"),
        (("nodes", 1, "id"), 0, "a node's id or an edge is there twice"),
        ((*TMPC, "timePerSample"), KeyError, r"TMPCs\['1'\]\[0\]: key 'timePerSample' is missing"),
        ((*TMPC, "timePerSample"), -1, "timePerSample: expected a number of at least 0, got -1"),
        ((*TMPC, "memoryUsageB"), float("nan"), "memoryUsageB: expected a number .*got nan"),
        (("edges", 0, "destId"), 9, "edge 0->9: no node has id 9"),
        (("edges", 0, "destId"), 2, "a node's id or an edge is there twice"),
        (("edges", 0, "destId"), 0, "expected a graph without cycles, but a -> a"),
        (("bandwidth",), 0, "bandwidth: expected a number above 0, got 0"),
        (("maxDevices",), 2.5, "maxDevices: expected an integer, got 2.5"),
    ],
)
def test_broken_files(tmp_path, place, value, match):
    path = write_piper(tmp_path / "w.json", DOCUMENT, *place, value=value)
    with pytest.raises(ValueError, match=match):
        read(path)


def test_names_stay_different(tmp_path):
    document = copy.deepcopy(DOCUMENT)
    for node, name in zip(document["nodes"], ("node1", "x", "x"), strict=True):
        node["name"] = name
    workload = read(write_piper(tmp_path / "w.json", document))
    assert [operator.name for operator in workload.graph] == ["node0", "node1", "node2"]


def test_no_json(tmp_path):
    path = tmp_path / "w.json"
    path.write_text('{"nodes": [')
    with pytest.raises(ValueError, match=r"w.json: not JSON: .*line 1"):
        read(path)


def test_tensor_parallel_operators_have_no_plain_plan(tmp_path):
    ways = DOCUMENT["nodes"][1]["TMPCs"]["1"]
    path = write_piper(tmp_path / "w.json", DOCUMENT, "nodes", 1, "TMPCs", value={"2": ways})
    with pytest.raises(ValueError, match=r"operator 'b' needs tensor parallelism .*degrees 2"):
        read(path)


def test_piper_and_pipedream_tell_the_same_of_resnet():
    path = shared_graph("piper/resnet.json")
    piper = read(path, samples=128)
    dream = lightning_gpp.read_pipedream_profile(
        shared_graph("pipedream/resnet50.txt"), samples=128
    )
    costs = piper.costs.at(128).operators
    assert costs.keys() - dream.costs.at(128).operators.keys() == {"node1"}  # the input
    for name, cost in dream.costs.at(128).operators.items():
        assert costs[name].forward_s == pytest.approx(cost.forward_s)
        assert costs[name].backward_s == pytest.approx(cost.backward_s)
        assert costs[name].activation_bytes == cost.activation_bytes
