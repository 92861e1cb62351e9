from __future__ import annotations

from helpers.graphs import literal_graph

from lightning_gpp.planner import resolve_plan
from lightning_gpp.planner.plan.forks_and_joins import MOST_LINES, forks_and_joins

FORK_JOIN = literal_graph(
    {"stem": "x", "a": "stem", "b": "stem", "c": "stem", "cat()": "a b c", "head": "cat()"}
)


def test_a_stage_of_its_own_and_one_in_a_branch():
    plan = resolve_plan([["stem"], ["a"], ["b"], ["c", "cat", "head"]], FORK_JOIN)
    assert forks_and_joins(plan, FORK_JOIN) == [
        "Fork: stage 0 owns stem, read by stages 1, 2, 3; it goes with what leads to it.",
        "Join: stage 3 owns cat, of stages 1, 2; the branch that ends in it sends nothing.",
    ]
    plan = resolve_plan([["stem", "a"], ["b"], ["c"], ["cat", "head"]], FORK_JOIN)
    assert forks_and_joins(plan, FORK_JOIN) == [
        "Fork: stage 0 owns stem, read by stages 1, 2; the branch that begins in it receives "
        "nothing.",
        "Join: stage 3 owns cat, of stages 0, 1, 2; it goes with what follows it, apart from all "
        "branches.",
    ]


def test_branches_inside_of_a_stage_are_none():
    plan = resolve_plan([["stem", "a", "b", "c"], ["cat", "head"]], FORK_JOIN)
    assert forks_and_joins(plan, FORK_JOIN) == []


def test_long_lists_are_cut():
    """stem -> 9 x (a_i, b_i) where every b_i reads stem too: a join in every other stage."""
    names = {f"a{i}": "stem" for i in range(9)} | {f"b{i}": f"a{i} stem" for i in range(9)}
    graph = literal_graph({"stem": "x", **names, "cat()": " ".join(f"b{i}" for i in range(9))})
    stages = [
        ["stem"],
        *([f"a{i}"] for i in range(9)),
        *([f"b{i}"] for i in range(8)),
        ["b8", "cat"],
    ]
    lines = forks_and_joins(resolve_plan(stages, graph), graph)
    assert len(lines) == MOST_LINES + 1
    assert lines[-1] == "… and 4 more forks and joins of stages."
