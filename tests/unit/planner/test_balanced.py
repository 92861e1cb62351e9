from __future__ import annotations

import dataclasses

import pytest
from helpers.graphs import literal_graph, profile_of, value
from helpers.planning import balanced_plan, evaluated

from lightning_gpp.cluster import Link, uniform_cluster
from lightning_gpp.cost import Profile
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner import Plan


def two_branches(length: int) -> ModelGraph:
    """Two chains from the input that a head joins.

    x ─┬─> a.0 ─> … ─┬─> cat ─> head
       └─> b.0 ─> … ─┘
    """
    operators = {}
    for branch in "ab":
        for i in range(length):
            operators[f"{branch}.{i}"] = f"{branch}.{i - 1}" if i else "x"
    return literal_graph(operators | {"cat()": f"a.{length - 1} b.{length - 1}", "head": "cat()"})


def costs(graph: ModelGraph, **special: float) -> Profile:
    """One millisecond per module; functions are free."""
    return profile_of(graph, {o.name: special.get(o.name, 1e-3 if o.scope else 0.0) for o in graph})


def homes(plan: Plan) -> dict[str, int]:
    return {name: stage.devices[0] for stage in plan.stages for name in stage.operators}


def test_branches_of_unequal_weight_share_devices():
    """Three light branches cost as much as the heavy one: they go on one device."""
    graph = literal_graph(
        {"heavy": "x", "l.0": "x", "l.1": "x", "l.2": "x", "cat()": "heavy l.0 l.1 l.2"}
    )
    profile = costs(graph, heavy=3e-3)
    plan = balanced_plan(graph, num_devices=2, profile=profile, num_microbatches=8)
    home = homes(plan)
    assert home["l_0"] == home["l_1"] == home["l_2"] != home["heavy"]


def test_expensive_values_are_not_cut():
    """Equal work asks for a cut after b, a slow link for one where little is sent."""
    graph = literal_graph({"a": "x", "b": "a", "c": "b", "d": "c"})
    wide = dataclasses.replace(graph.operator["b"], outputs=(value("b", features=4096),))
    operators = tuple(wide if operator.name == "b" else operator for operator in graph)
    graph = dataclasses.replace(graph, operators=operators)
    slow = uniform_cluster(2, Link(bandwidth_bytes_per_s=1e6))
    plan = balanced_plan(
        graph, num_devices=2, profile=costs(graph), num_microbatches=2, cluster=slow
    )
    assert [len(stage.operators) for stage in plan.stages] != [2, 2]


def test_common_state_is_kept_together():
    #  x ─> a ─> b ─> c ─> d ; a and c share running statistics, so b stays with them
    graph = literal_graph(
        {"a": "x", "b": "a", "c": "b", "d": "c"}, state={"a": ["norm"], "c": ["norm"]}
    )
    plan = balanced_plan(graph, num_devices=2, profile=costs(graph), num_microbatches=4)
    assert [stage.operators for stage in plan.stages] == [("a", "b", "c"), ("d",)]
    with pytest.raises(
        ValueError, match=r"3 devices .* only 2 operators .*\(2 more .* common state"
    ):
        balanced_plan(graph, num_devices=3, profile=costs(graph), num_microbatches=4)


def test_without_a_profile_the_plan_says_estimated():
    graph = two_branches(length=2)
    assert balanced_plan(graph, num_devices=2, num_microbatches=4).planner == "balanced (estimated)"


def test_parallel_branches_shorten_the_step():
    """The chain of all modules, as pipelines without graphs need it, takes longer."""
    graph = two_branches(length=3)
    chain = literal_graph(
        {
            "a.0": "x",
            "a.1": "a.0",
            "a.2": "a.1",
            "b.0": "a.2",
            "b.1": "b.0",
            "b.2": "b.1",
            "h": "b.2",
        }
    )
    step_s = {}
    for name, model in (("graph", graph), ("chain", chain)):
        profile = costs(model, head=3e-3, h=3e-3)
        plan = balanced_plan(model, num_devices=3, profile=profile, num_microbatches=4)
        step_s[name] = evaluated(plan, model, profile=profile, num_microbatches=4).step_s
    assert step_s["graph"] < 0.9 * step_s["chain"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_devices": 9}, "9 devices need as many stages, .* only 6 operators"),
        ({"num_devices": 0}, "a cluster needs at least 1 device, got 0"),
        ({"num_microbatches": 0}, "num_microbatches must be at least 1, got 0"),
        ({"planner": "best"}, "unknown planner 'best'; known planners: balanced"),
        ({"schedule": "2f2b"}, "unknown schedule '2f2b'; known schedules: gpipe, 1f1b"),
        ({"profile": Profile({}, 1)}, "no costs of a_0, .* cat and 1 more; .* profile again"),
    ],
)
def test_wrong_questions_are_refused(arguments, match):
    usual = {"num_devices": 2, "num_microbatches": 4}
    with pytest.raises(ValueError, match=match):
        balanced_plan(two_branches(length=2), **(usual | arguments))
