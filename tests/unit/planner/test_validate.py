from __future__ import annotations

import pytest
from helpers.graphs import literal_graph

from lightning_gpp.planner import Plan, Stage, validate_plan

#  x ─> a ─> b ─> c
CHAIN = literal_graph({"a": "x", "b": "a", "c": "b"})


def plan(*stages: tuple[str, int, int]) -> Plan:
    return Plan(
        tuple(
            Stage(i, (ops), (d,), m)
            for i, (ops, d, m) in enumerate(
                (tuple(names.split()), device, multiple) for names, device, multiple in stages
            )
        )
    )


def test_a_valid_plan_gives_its_stage_graph():
    stages = validate_plan(plan(("a b", 0, 1), ("c", 1, 1)), CHAIN, num_devices=2)
    assert [(e.source, e.target) for e in stages.edges] == [(-1, 0), (0, 1)]


def test_two_stages_may_share_a_device():
    validate_plan(plan(("a", 0, 1), ("b", 1, 1), ("c", 0, 1)), CHAIN, num_devices=2)


def test_devices_exist():
    with pytest.raises(
        ValueError, match=r"stage 1 is on device 2, but there are 2 devices \(0 … 1\)"
    ):
        validate_plan(plan(("a b", 0, 1), ("c", 2, 1)), CHAIN, num_devices=2)


def test_replicas_cannot_run_yet():
    replicated = Plan((Stage(0, ("a", "b", "c"), (0, 1), 2),))
    with pytest.raises(ValueError, match=r"stage 0 is on devices \[0, 1\]: replicas .* yet"):
        validate_plan(replicated, CHAIN, num_devices=2)


def test_stages_are_convex():
    with pytest.raises(ValueError, match="stage 0 reads 'b' from stage 1"):
        validate_plan(plan(("a c", 0, 1), ("b", 1, 1)), CHAIN, num_devices=2)


def test_common_state_stays_in_one_stage():
    graph = literal_graph(
        {"a": "x", "b": "a", "c": "b"}, state={"a": ["norm.mean"], "c": ["norm.mean"]}
    )
    validate_plan(plan(("a b c", 0, 1)), graph, num_devices=1)
    with pytest.raises(
        ValueError, match=r"a, c all change 'norm.mean', but are in stages \[0, 1\]"
    ):
        validate_plan(plan(("a b", 0, 1), ("c", 1, 1)), graph, num_devices=2)


def test_the_last_stage_makes_an_output():
    graph = literal_graph({"a": "x", "b": "a"}, outputs=["a"])
    with pytest.raises(ValueError, match=r"last stage \(1\) makes no output .* put one of a into"):
        validate_plan(plan(("a", 0, 1), ("b", 1, 1)), graph, num_devices=2)


def test_multiples_divide_each_other_along_edges():
    validate_plan(plan(("a", 0, 2), ("b", 1, 4), ("c", 2, 1)), CHAIN, num_devices=3)
    with pytest.raises(
        ValueError, match=r"stage 0 \(microbatch_multiple 2\) to stage 1 \(3\): one"
    ):
        validate_plan(plan(("a", 0, 2), ("b c", 1, 3)), CHAIN, num_devices=2)


def test_values_between_multiples_have_samples():
    graph = literal_graph({"a": "x", "b": "a", "c": "b"}, unbatched=["a"])
    validate_plan(plan(("a", 0, 2), ("b c", 1, 2)), graph, num_devices=2)
    with pytest.raises(ValueError, match=r"'a' goes from stage 0 .* has no dimension of samples"):
        validate_plan(plan(("a", 0, 1), ("b c", 1, 2)), graph, num_devices=2)
