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
    placed = validate_plan(plan(("a b", 0, 1), ("c", 1, 1)), CHAIN, num_devices=2)
    assert [(e.source, e.target) for e in placed.stages.edges] == [(-1, 0), (0, 1)]


def test_two_stages_may_share_a_device():
    validate_plan(plan(("a", 0, 1), ("b", 1, 1), ("c", 0, 1)), CHAIN, num_devices=2)


def test_devices_exist():
    with pytest.raises(
        ValueError, match=r"stage 1 is on device 2, but there are 2 devices \(0 … 1\)"
    ):
        validate_plan(plan(("a b", 0, 1), ("c", 2, 1)), CHAIN, num_devices=2)


def test_a_replicated_last_stage_is_followed_by_the_loss():
    replicated = Plan((Stage(0, ("a", "b"), (0,)), Stage(1, ("c",), (2, 1), 2)))
    placed = validate_plan(replicated, CHAIN, num_devices=3)
    assert placed.devices == ((0,), (2, 1), (2,))
    assert placed.multiples == (1, 2, 2)
    assert placed.stages.edge[1, 2].values == ("c",)


def test_values_between_replicas_have_samples():
    graph = literal_graph({"a": "x", "b": "a", "c": "b"}, unbatched=["a"])
    same = Plan((Stage(0, ("a",), (0,)), Stage(1, ("b",), (1, 2), 2), Stage(2, ("c",), (0,), 2)))
    validate_plan(same, graph, num_devices=3)  # every replica takes one unit, as stage 0 does
    cut = Plan((Stage(0, ("a",), (0,), 2), Stage(1, ("b", "c"), (1, 2), 2)))
    with pytest.raises(ValueError, match=r"'a' goes from stage 0 .* to stage 1 \(takes \[1, 1\]\)"):
        validate_plan(cut, graph, num_devices=3)


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (Stage(0, ("a", "b", "c"), (0, 1), 2), r"stage 0 has 2 replicas, but .* 'b' changes"),
        (Stage(0, ("a", "b", "c"), (0,), recompute=True), "stage 0 recomputes .* 'b' changes"),
    ],
)
def test_what_changes_state_runs_once(stage, message):
    graph = literal_graph({"a": "x", "b": "a", "c": "b"}, state={"b": ["norm.mean"]})
    with pytest.raises(ValueError, match=message):
        validate_plan(Plan((stage,)), graph, num_devices=2)


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
        ValueError,
        match=r"stage 0 \(takes \[2\]\) to stage 1 \(takes \[3\]\): the microbatch_multiple of one",
    ):
        validate_plan(plan(("a", 0, 2), ("b c", 1, 3)), CHAIN, num_devices=2)


def test_values_between_multiples_have_samples():
    graph = literal_graph({"a": "x", "b": "a", "c": "b"}, unbatched=["a"])
    validate_plan(plan(("a", 0, 2), ("b c", 1, 2)), graph, num_devices=2)
    with pytest.raises(ValueError, match=r"'a' goes from stage 0 .* cannot be split"):
        validate_plan(plan(("a", 0, 1), ("b c", 1, 2)), graph, num_devices=2)
