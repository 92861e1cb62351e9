"""Branches of a block that may stand for each other, on random models."""

from __future__ import annotations

from itertools import combinations

import pytest
from helpers.graphs import branchy_graphs, literal_graph, profile_of
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner.graphpipe.problem import branching, search_units
from lightning_gpp.planner.graphpipe.space.branches import Branches
from lightning_gpp.planner.graphpipe.space.layout import ElementRun, joined
from lightning_gpp.planner.graphpipe.space.space import Space
from lightning_gpp.planner.make_plan import plan_request


def space_of(graph: ModelGraph) -> Space:
    request = plan_request(graph, 4, minibatch_size=8, costs=profile_of(graph))
    return branching(request, search_units(request)).space(2.0)


def blocks(space: Space) -> list[tuple[ElementRun, ...]]:
    """The branches of every block, whole ones and their beginnings."""
    todo, found = [space.layout.root], []
    while todo:
        for runs in todo.pop().blocks.values():
            found.append(runs)
            todo += runs
    return found


def groups_by_mix(
    branches: Branches, runs: tuple[ElementRun, ...]
) -> dict[object, list[tuple[ElementRun, ...]]]:
    found: dict[object, list[tuple[ElementRun, ...]]] = {}
    for size in range(1, len(runs) + 1):
        for group in combinations(runs, size):
            mix = sorted((w, len(some)) for w, some in branches.by_weight(group).items())
            found.setdefault(tuple(mix), []).append(group)
    return found


def places(group: tuple[ElementRun, ...]) -> tuple[tuple[int, int], ...]:
    return joined((), *(run.interval for run in group))


@given(branchy_graphs(), st.booleans())
@settings(max_examples=60)
def test_stages_of_as_many_branches_of_each_weight_are_alike(graph, with_beginnings):
    space = space_of(graph)
    for runs in blocks(space):
        if with_beginnings:
            beginning = space.beginnings.beginning
            runs = tuple(beginning(r, 1) if index % 2 else r for index, r in enumerate(runs))
        for groups in groups_by_mix(space.branches, runs).values():
            for crew in space.crews:
                first, *others = (space.rates(places(group), crew) for group in groups)
                for other in others:
                    assert other == pytest.approx(first)
            assert len({space.rates.contents[places(group)] for group in groups}) == 1


@given(branchy_graphs())
@settings(max_examples=40)
def test_a_stage_of_more_branches_takes_and_holds_no_less(graph):
    space = space_of(graph)
    for runs in blocks(space):
        for size in range(1, len(runs)):
            for group in combinations(runs, size):
                fewer = [space.rates(places(group[:-1] or group), crew) for crew in space.crews]
                rates = [space.rates(places(group), crew) for crew in space.crews]
                for less, more in zip(fewer, rates):
                    assert more.seconds_per_sample >= less.seconds_per_sample * (1 - 1e-9)
                    assert more.most_in_flight <= less.most_in_flight
                    assert more.recomputed_most_in_flight <= less.recomputed_most_in_flight


@given(branchy_graphs())
@settings(max_examples=40)
def test_no_stage_of_branches_is_faster_than_their_weights(graph):
    space = space_of(graph)
    for runs in blocks(space):
        for mix, groups in groups_by_mix(space.branches, runs).items():
            least = space.branches.seconds(mix)
            for crew, least_s in zip(space.crews, least):
                rate = space.rates(places(groups[0]), crew)
                assert rate.seconds_per_sample >= least_s * (1 - 1e-9)


def test_branches_that_share_a_parameter_do_not_stand_for_others():
    """b0 and b1 share their parameter, b2 and b3 have their own: alike alone, but not together."""
    graph = literal_graph(
        {f"b{index}": "x" for index in range(4)} | {"join": "b0 b1 b2 b3"},
        parameters={"b0": ["w"], "b1": ["w"], "b2": ["b2.w"], "b3": ["b3.w"]},
    )
    space = space_of(graph)
    (runs,) = blocks(space)
    names = {
        space.layout.order[run.start]: space.branches.weight(run) for run in runs
    }  # units are in the order of the operators
    assert names[2] == names[3] not in (names[0], names[1])


@pytest.mark.parametrize("stem", ["x", "s"])
def test_branches_that_all_read_one_value_stand_for_each_other(stem):
    graph = literal_graph(
        {"s": "x"} | {f"b{index}": stem for index in range(3)} | {"join": "b0 b1 b2 s"}
    )
    space = space_of(graph)
    for runs in blocks(space):
        if len(runs) == 3:
            assert len({space.branches.weight(run) for run in runs}) == 1
