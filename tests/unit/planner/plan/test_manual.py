from __future__ import annotations

import json

import pytest
from helpers.graphs import literal_graph

from lightning_gpp.graph import stage_graph
from lightning_gpp.planner import Plan, Stage, plan_to_json, resolve_plan, save_plan

#           ┌─> encoders.a.0 ─> encoders.a.1 ─┐
#  x ─> view┤                                 ├─> cat ─> fusion.0 ─> relu ─> head
#           └─> encoders.b.0 ─────────────────┘
GRAPH = literal_graph(
    {
        "view()": "x",
        "encoders.a.0": "view()",
        "encoders.a.1": "encoders.a.0",
        "encoders.b.0": "view()",
        "cat()": "encoders.a.1 encoders.b.0",
        "fusion.0": "cat()",
        "relu()": "fusion.0",
        "head": "relu()",
    }
)


def stages_of(plan: Plan) -> list[tuple[tuple[str, ...], int]]:
    return [(stage.operators, stage.devices[0]) for stage in plan.stages]


def test_modules_stand_for_everything_in_them():
    plan = resolve_plan([["encoders.a"], ["encoders.b"], ["fusion", "head"]], GRAPH)
    assert plan.planner == "manual"
    assert stages_of(plan)[0] == (("view", "encoders_a_0", "encoders_a_1"), 0)


def test_unnamed_functions_stay_with_the_stage_they_read():
    plan = resolve_plan([["encoders.a", "encoders.b", "fusion"], ["head"]], GRAPH)
    assert plan.stages[0].operators[-2:] == ("fusion_0", "relu")


def test_unnamed_joins_go_to_their_consumer_so_that_branches_stay_independent():
    plan = resolve_plan([["encoders.a"], ["encoders.b"], ["fusion", "head"]], GRAPH)
    assert plan.stages[1].operators == ("encoders_b_0",)
    assert plan.stages[2].operators == ("cat", "fusion_0", "relu", "head")
    stages = stage_graph(GRAPH, plan.stage_operators)
    assert stages.successors == {0: (1, 2), 1: (2,), 2: ()}  # 0 hands the shared view to 1


def test_what_follows_a_join_without_consumers_goes_to_its_latest_producer():
    #  x ─┬─> a ─┬─> cat ─> relu ─> (output)
    #     └─> b ─┘
    graph = literal_graph({"a": "x", "b": "x", "cat()": "a b", "relu()": "cat()"})
    plan = resolve_plan([["a"], ["b"]], graph)
    assert [stage.operators for stage in plan.stages] == [("a",), ("b", "cat", "relu")]


def test_unnamed_functions_on_inputs_go_to_their_first_reader():
    plan = resolve_plan([["encoders.b"], ["encoders.a", "fusion", "head"]], GRAPH)
    assert plan.stages[0].operators == ("view", "encoders_b_0")


def test_the_longest_name_wins():
    plan = resolve_plan([["encoders"], ["encoders.a.1", "fusion"], ["head"]], GRAPH)
    assert plan.stages[0].operators == ("view", "encoders_a_0", "encoders_b_0")
    assert plan.stages[1].operators == ("encoders_a_1", "cat", "fusion_0", "relu")


def test_operators_and_functions_can_be_named():
    by_operator = resolve_plan([["encoders"], ["cat", "fusion_0", "head"]], GRAPH)
    by_function = resolve_plan([["encoders"], ["torch.cat", "fusion", "head"]], GRAPH)
    assert by_operator == by_function
    assert by_operator.stages[1].operators == ("cat", "fusion_0", "relu", "head")


def test_stages_are_renumbered_and_keep_their_devices():
    plan = resolve_plan([["fusion", "head"], ["encoders.a"], ["encoders.b"]], GRAPH)
    assert stages_of(plan) == [
        (("view", "encoders_a_0", "encoders_a_1"), 1),
        (("encoders_b_0",), 2),
        (("cat", "fusion_0", "relu", "head"), 0),
    ]


def test_a_mapping_gives_device_and_microbatch_multiple():
    plan = resolve_plan(
        [
            {"modules": ["encoders"], "device": 3},
            {"modules": "fusion", "microbatch_multiple": 2},
            "head",
        ],
        GRAPH,
    )
    assert [stage.devices for stage in plan.stages] == [(3,), (1,), (2,)]
    assert [stage.microbatch_multiple for stage in plan.stages] == [1, 2, 1]


def test_a_stage_with_an_output_comes_last():
    # both branches are ends, but only b is returned
    graph = literal_graph({"stem": "x", "b": "stem", "a": "stem"}, outputs=["b"])
    plan = resolve_plan([["stem"], ["b"], ["a"]], graph)
    assert [stage.operators for stage in plan.stages] == [("stem",), ("a",), ("b",)]


def test_no_stage_with_an_output_can_come_last():
    graph = literal_graph({"stem": "x", "b": "stem"}, outputs=["stem"])
    with pytest.raises(ValueError, match=r"\[b\] would come last, but no output .* of stem"):
        resolve_plan([["stem"], ["b"]], graph)


def test_an_output_joined_by_a_function_ends_the_later_branch():
    #  x ─┬─> a ─┬─> cat ─> (output)
    #     └─> b ─┘
    graph = literal_graph({"a": "x", "b": "x", "cat()": "a b"})
    plan = resolve_plan([["b"], ["a"]], graph)
    assert [stage.operators for stage in plan.stages] == [("b",), ("a", "cat")]


def test_modules_that_nobody_names_are_listed():
    with pytest.raises(
        ValueError, match=r"does not cover the model: no stage names fusion\.0, head;"
    ):
        resolve_plan([["encoders.a"], ["encoders.b"]], GRAPH)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("encoder.a", "'encoder.a' is not in this model; did you mean 'encoders.a'"),
        ("encoders.a.0.linear", "inside 'encoders.a.0', which was captured as one operator"),
        ("zzz", "'zzz' is not in this model; its modules: encoders, "),
        ("", "'' is not in this model"),
    ],
)
def test_names_that_match_nothing_get_help(name, match):
    with pytest.raises(ValueError, match=match):
        resolve_plan([[name], ["encoders", "fusion", "head"]], GRAPH)


def test_a_cycle_names_its_stages():
    with pytest.raises(ValueError, match=r"in a circle, from \[encoders, head\] to \[fusion\] to"):
        resolve_plan([["encoders", "head"], ["fusion"]], GRAPH)


def test_a_name_counts_once():
    with pytest.raises(ValueError, match="'fusion' is named in stage 0 and in stage 1"):
        resolve_plan([["encoders", "fusion"], ["fusion", "head"]], GRAPH)


def test_a_stage_must_keep_something():
    with pytest.raises(ValueError, match=r"stage 0 \[encoders.b\] gets no operator"):
        resolve_plan([["encoders.b"], ["encoders.b.0"], ["encoders.a", "fusion", "head"]], GRAPH)


@pytest.mark.parametrize(
    ("plan", "match"),
    [
        ([], "at least one stage"),
        ([[]], "stage 0 names no module"),
        ([[1]], r"stage 0: modules\[0\]: expected a string, got 1"),
        ([{"modules": ["head"], "place": 1}], "stage 0: unknown key 'place'"),
        ([{"modules": ["head"], "device": 1, "devices": [1]}], "both device and devices"),
        ([{"modules": ["encoders", "fusion", "head"], "devices": [0, 0]}], "a device twice"),
        ([{"device": 1}], "stage 0: key 'modules' is missing"),
        ([3], "stage 0: modules: expected an array"),
        (3, "not a plan: 3; expected a Plan"),
        ("nowhere.json", "no file 'nowhere.json'; expected a plan file"),
    ],
)
def test_other_forms_are_refused(plan, match):
    with pytest.raises(ValueError, match=match):
        resolve_plan(plan, GRAPH)


def test_plans_files_and_mappings_are_taken_as_they_are(tmp_path):
    plan = resolve_plan([["encoders"], ["fusion"], ["head"]], GRAPH)
    save_plan(plan, tmp_path / "plan.json")
    assert resolve_plan(plan, GRAPH) == plan
    assert resolve_plan(tmp_path / "plan.json", GRAPH) == plan
    assert resolve_plan(str(tmp_path / "plan.json"), GRAPH) == plan
    assert resolve_plan(json.loads(plan_to_json(plan)), GRAPH) == plan


def test_a_plan_of_another_model_is_refused():
    with pytest.raises(
        ValueError, match="'other', which is not in this model: the plan is of another one"
    ):
        resolve_plan(Plan((Stage(0, ("other",), (0,)),)), GRAPH)


def test_shares_are_whole_numbers_of_smallest_micro_batches():
    whole = {"modules": ["encoders", "fusion", "head"], "devices": [0, 1]}
    (stage,) = resolve_plan([whole | {"shares": [2, 1]}], GRAPH).stages
    assert (stage.shares, stage.microbatch_multiple) == ((2, 1), 3)
    with pytest.raises(ValueError, match=r"stage 0: shares\[0\]: expected an integer, got 0.75"):
        resolve_plan([whole | {"shares": [0.75, 0.25]}], GRAPH)
