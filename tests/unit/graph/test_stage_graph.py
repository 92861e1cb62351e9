from __future__ import annotations

import dataclasses

import pytest
from helpers.graphs import literal_graph, stage_edges

from lightning_gpp.graph import FEED, GraphInput, StageEdge, StageGraph, stage_graph

#            ┌─> a ──┐
#  x ─> stem ┤       ├─> cat ─> head ─> (output)
#            └─> b ──┘
#       0        1 2      3
FORK_JOIN = literal_graph({"stem": "x", "a": "stem", "b": "stem", "cat()": "a b", "head": "cat()"})
VALUE_BYTES = 4 * 16 * 4


def pairs(stages: StageGraph) -> list[tuple[int, int]]:
    return [(edge.source, edge.target) for edge in stages.edges]


def test_fork_and_join():
    stages = stage_graph(FORK_JOIN, [["stem"], ["a"], ["b"], ["cat", "head"]])
    assert pairs(stages) == [(FEED, 0), (0, 1), (0, 2), (1, 3), (2, 3)]
    assert dict(stages.depths) == {0: 3, 1: 2, 2: 2, 3: 1}
    assert stages.successors[0] == (1, 2)
    assert stages.predecessors[3] == (1, 2)
    assert stages.edge[0, 2] == StageEdge(0, 2, ("stem",), VALUE_BYTES, has_backward=True)


def test_the_feed_carries_gradients_only_where_an_input_needs_them():
    frozen = stage_graph(FORK_JOIN, [[operator.name for operator in FORK_JOIN]])
    assert frozen.edge[FEED, 0].has_backward is False
    (x,) = FORK_JOIN.inputs
    graph = dataclasses.replace(FORK_JOIN, inputs=(GraphInput(x.value, requires_grad=True),))
    trained = stage_graph(graph, [[operator.name for operator in graph]])
    assert trained.edge[FEED, 0].has_backward is True


def test_outputs_of_other_stages_travel_to_the_last():
    #  x ─> a ─> b ─> (output)
    #       └───────> (output)
    graph = literal_graph({"a": "x", "b": "a", "c": "b"}, outputs=["a", "c"])
    stages = stage_graph(graph, [["a"], ["b"], ["c"]])
    assert pairs(stages) == [(FEED, 0), (0, 1), (0, 2), (1, 2)]
    assert stages.edge[0, 2].values == ("a",)


def test_one_message_carries_all_values_of_an_edge():
    graph = literal_graph({"a": "x", "b": "a", "add()": "a b"})
    stages = stage_graph(graph, [["a", "b"], ["add"]])
    assert stages.edge[0, 1] == StageEdge(0, 1, ("a", "b"), 2 * VALUE_BYTES)


def test_shared_parameters_name_their_stages():
    graph = literal_graph(
        {"embed": "x", "mix": "embed", "head": "mix"}, parameters={"head": ["embed.weight"]}
    )
    stages = stage_graph(graph, [["embed"], ["mix"], ["head"]])
    assert stages.shared_parameters == (("embed.weight", (0, 2)),)
    assert stage_graph(graph, [["embed", "mix", "head"]]).shared_parameters == ()


@pytest.mark.parametrize(
    ("division", "match"),
    [
        ([["stem"], ["a"], ["cat", "head"]], "does not cover the model: no stage holds b"),
        ([["stem", "a"], ["a", "b", "cat", "head"]], "'a' is in stages 0 and 1"),
        (
            [["stem", "q"], ["a", "b", "cat", "head"]],
            "stage 0 of the plan names 'q', which is not in this",
        ),
        (
            [["stem", "cat"], ["a", "b", "head"]],
            "stage 0 reads 'a' from stage 1: a stage may",
        ),
    ],
)
def test_wrong_divisions_are_refused(division, match):
    with pytest.raises(ValueError, match=match):
        stage_graph(FORK_JOIN, division)


@pytest.mark.parametrize(
    ("num_stages", "edges", "depths"),
    [
        (1, "", [1]),
        (4, "0>1 1>2 2>3", [4, 3, 2, 1]),  # chain
        (4, "0>1 1>2 2>3 0>3", [4, 3, 2, 1]),  # a skip changes nothing
        (7, "0>6 1>6 2>6 3>6 4>6 5>6", [2, 2, 2, 2, 2, 2, 1]),  # six branches into one
        (5, "0>1 1>2 0>3 2>4 3>4", [4, 3, 2, 2, 1]),  # branches of two lengths
    ],
)
def test_depths(num_stages, edges, depths):
    assert list(stage_edges(num_stages, edges).depths.values()) == depths
