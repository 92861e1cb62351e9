from __future__ import annotations

import pytest
from helpers.graphs import literal_graph, value

from lightning_gpp.graph import ModelGraph, OpNode, TensorSpec

#  x ─┬─> a ──> b ─┬─> cat ──> head
#     └─> c ───────┘
DIAMOND = literal_graph({"a": "x", "b": "a", "c": "x", "cat()": "b c", "head": "cat()"})


def test_neighbours_are_in_topological_order():
    assert DIAMOND.predecessors["cat"] == ("b", "c")
    assert DIAMOND.successors["a"] == ("b",)
    assert DIAMOND.predecessors["c"] == ()
    assert DIAMOND.successors["head"] == ()


def test_inputs_have_no_producer():
    assert "x" not in DIAMOND.producer
    assert DIAMOND.producer["b"] == "b"
    assert DIAMOND.values["x"].size_bytes == 4 * 16 * 4


def test_a_value_read_twice_makes_one_predecessor():
    graph = literal_graph({"a": "x", "add()": "a a"})
    assert graph.predecessors["add"] == ("a",)


@pytest.mark.parametrize(
    ("operators", "match"),
    [
        ((OpNode("a", "a", "a", ("y",), ()),), "reads 'y', which neither"),
        ((OpNode("a", "a", "a", (), ()), OpNode("a", "b", "b", (), ())), "'a' is used twice"),
        ((OpNode("a", "a", "a", (), (value("v"), value("v"))),), "'v' is used twice"),
        ((OpNode("a", "a", "a", (), (), ("w",)),), r"reads parameters \['w'\]"),
    ],
)
def test_broken_graphs_are_refused(operators, match):
    with pytest.raises(ValueError, match=match):
        ModelGraph(inputs=(), operators=operators, outputs=())


def test_unknown_output_is_refused():
    with pytest.raises(ValueError, match="returns 'v', which nothing produces"):
        ModelGraph(inputs=(), operators=(), outputs=("v",))


def test_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="unknown dtype 'float31'; expected one of: bool"):
        TensorSpec((2,), "float31")


@pytest.mark.parametrize(("dtype", "answer"), [("bfloat16", True), ("int64", False)])
def test_gradients_exist_for_floating_point_only(dtype, answer):
    assert TensorSpec((2,), dtype).is_differentiable is answer
