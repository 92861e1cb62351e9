"""The ways of branches beside an owner, on random models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.graphs import branchy_graphs, profile_of, profiles
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpp.cost import Costs
from lightning_gpp.planner.graphpipe.divide import siblings
from lightning_gpp.planner.graphpipe.divide.frontier import Way, collect_cuts
from lightning_gpp.planner.graphpipe.divide.partition import LimitedWays
from lightning_gpp.planner.graphpipe.problem import branching, search_units
from lightning_gpp.planner.graphpipe.space.layout import ElementRun
from lightning_gpp.planner.graphpipe.space.space import Space
from lightning_gpp.planner.make_plan import plan_request


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    graph = draw(branchy_graphs())
    costs = Costs((draw(profiles(graph)) if draw(st.booleans()) else profile_of(graph),))
    request = plan_request(graph, draw(st.integers(2, 8)), minibatch_size=16, costs=costs)
    problem = branching(request, search_units(request))
    take_turns = draw(st.booleans()) and problem.can_take_turns
    return problem.space(draw(st.sampled_from([1.0, 4.0])), take_turns=take_turns)


def asked(space: Space) -> Iterator[tuple[ElementRun, ...]]:
    """The branches of every block."""
    todo = [space.layout.root]
    while todo:
        for runs in todo.pop().blocks.values():
            yield runs
            todo += runs


def ways_of(space: Space, runs: tuple[ElementRun, ...], limit_s: float) -> list[Way]:
    return LimitedWays(space, limit_s).siblings.ways(runs, need=3, offset=1)


def front(ways: list[Way]) -> list[tuple[int, ...]]:
    return sorted(way[:3] for way in ways)


factors = st.floats(1.0, 4.0)


@given(spaces(), factors, st.booleans())
@settings(max_examples=60)
def test_ways_hold_every_branch_in_stages_that_fit(space, factor, are_packed):
    limit_s = max(space.lower_bound_s, 1e-18) * factor
    for runs in asked(space):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(siblings, "FEW_BRANCHES", 0 if are_packed else 6)
            ways = ways_of(space, runs, limit_s)
        for way in ways:
            places, used = [], 0
            for cut, shift in collect_cuts(way.trace):
                moved = tuple((start + shift, stop + shift) for start, stop in cut.intervals)
                places += [place for start, stop in moved for place in range(start, stop)]
                used += cut.crew.num_replicas
                rate = space.rates(moved, cut.crew)
                assert rate.seconds_per_sample <= limit_s * (1 + 1e-9)
                assert space.in_flight(cut.units, cut.crew) <= rate.most_in_flight
            assert sorted(places) == [p for run in runs for p in range(*run.interval)]
            assert used == way.used


@given(spaces(), factors)
@settings(max_examples=40)
def test_no_packing_is_better_than_all_groups(space, factor):
    limit_s = max(space.lower_bound_s, 1e-18) * factor
    for runs in asked(space):
        best = front(ways_of(space, runs, limit_s))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(siblings, "FEW_BRANCHES", 0)
            packed = front(ways_of(space, runs, limit_s))
        for way in packed:
            assert any(all(a <= b for a, b in zip(other, way)) for other in best)
