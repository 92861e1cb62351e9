from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpp.graph.series_parallel import (
    MAX_NESTING,
    Leaf,
    Parallel,
    Series,
    Tree,
    decompose,
    leaves,
)


def text(tree: Tree) -> str:
    """``0 (1 | 2) 3`` for a fork and its join."""
    if isinstance(tree, Leaf):
        return str(tree.node)
    if isinstance(tree, Parallel):
        return "(" + " | ".join(map(text, tree.parts)) + ")"
    return " ".join(map(text, tree.parts))


def before(tree: Tree) -> set[tuple[int, int]]:
    """All (earlier, later) pairs that a tree orders."""
    if isinstance(tree, Leaf):
        return set()
    pairs = set().union(*map(before, tree.parts))
    if isinstance(tree, Series):
        for index, part in enumerate(tree.parts):
            for later in tree.parts[index + 1 :]:
                pairs |= {(one, other) for one in leaves(part) for other in leaves(later)}
    return pairs


def closure(predecessors) -> set[tuple[int, int]]:
    pairs: set[tuple[int, int]] = set()
    for node, sources in enumerate(predecessors):
        for source in sources:
            pairs |= {(source, node)} | {(first, node) for first, last in pairs if last == source}
    return pairs


@pytest.mark.parametrize(
    ("predecessors", "expected"),
    [
        ([()], "0"),
        ([(), (0,), (1,)], "0 1 2"),
        ([(), (), (0, 1)], "(0 | 1) 2"),
        ([(), (0,), (0,), (1, 2)], "0 (1 | 2) 3"),
        ([(), (0,), (0, 1)], "0 1 2"),  # an edge beside a path orders nothing
        ([(), (0,), (0,), (1,), (3, 2)], "0 (1 3 | 2) 4"),
        ([(), (), (0, 1), (0, 1)], "(0 | 1) (2 | 3)"),
        ([(), (), ()], "(0 | 1 | 2)"),
        #  0 ─┬─ 1 ─┬─ 2 ─┬─ 5
        #     │     └─ 3 ─┘│
        #     └─ 4 ────────┘
        ([(), (0,), (1,), (1,), (0,), (2, 3, 4)], "0 (1 (2 | 3) | 4) 5"),
    ],
)
def test_series_parallel_graphs(predecessors, expected):
    found = decompose(predecessors)
    assert text(found.tree) == expected
    assert found.added == ()


def test_the_smallest_graph_that_is_not_series_parallel_gets_one_edge():
    #  0 ─> 2 <─ 1 ─> 3
    found = decompose([(), (), (0, 1), (1,)])
    assert text(found.tree) == "(0 | 1) (2 | 3)"
    assert found.added == ((0, 3),)


def test_only_the_entangled_branches_are_synchronised():
    #  four branches of three operators; the second operator of one also feeds the third of another
    branches = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
    predecessors: list[tuple[int, ...]] = [()] * 14
    for first, second, third in branches:
        predecessors[first], predecessors[second], predecessors[third] = (0,), (first,), (second,)
    predecessors[13] = (3, 6, 9, 12)
    predecessors[6] = (2, 5)
    found = decompose(predecessors)
    assert found.added == ((5, 3),)
    assert "7 8 9" in text(found.tree) and "10 11 12" in text(found.tree)


@given(st.data())
def test_the_tree_orders_what_the_graph_orders_and_what_was_added(data):
    count = data.draw(st.integers(1, 9))
    predecessors = [
        tuple(data.draw(st.sets(st.integers(0, node - 1), max_size=3))) if node else ()
        for node in range(count)
    ]
    found = decompose(predecessors)
    assert sorted(leaves(found.tree)) == list(range(count))
    with_added = [
        (*sources, *(one for one, other in found.added if other == node))
        for node, sources in enumerate(predecessors)
    ]
    order = {node: place for place, node in enumerate(leaves(found.tree))}
    renamed = [()] * count
    for node, sources in enumerate(with_added):
        renamed[order[node]] = tuple(sorted(order[source] for source in sources))
    pairs = {(order[one], order[other]) for one, other in before(found.tree)}
    assert pairs == closure(renamed)


def test_deep_nesting_becomes_a_chain():
    #  every operator but the last two of a ladder has a branch beside all that follows
    count = 2 * MAX_NESTING + 60
    predecessors = [()] + [(node - 2 + node % 2,) for node in range(1, count)]
    found = decompose([tuple(max(0, s) for s in sources) for sources in predecessors])
    assert sorted(leaves(found.tree)) == list(range(count))
    assert found.added


def test_edges_must_be_topological():
    with pytest.raises(ValueError, match=r"edge 1->0 is not in topological order"):
        decompose([(1,), ()])
