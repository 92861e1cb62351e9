"""Branches packed into stages by time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gpp.planner.graphpipe.divide.packing import first_fit, groups_of
from lightning_gpp.planner.graphpipe.space.branches import AlikeBranches
from lightning_gpp.planner.graphpipe.space.layout import ElementRun


@st.composite
def loads(draw: st.DrawFn) -> list[AlikeBranches]:
    seconds = sorted(draw(st.lists(st.integers(0, 12), max_size=5)), reverse=True)
    return [
        AlikeBranches(float(each), number, draw(st.integers(1, 5)))
        for number, each in enumerate(seconds)
    ]


def one_by_one(loads: list[AlikeBranches], limit_s: float, most: int) -> list[dict[int, int]]:
    """First fit as the books have it: for every branch all stages in turn."""
    stages: list[tuple[float, dict[int, int]]] = []
    for each_s, weight, count in loads:
        for _ in range(count):
            for index, (room_s, mix) in enumerate(stages):
                if each_s <= room_s and sum(mix.values()) < most:
                    mix[weight] = mix.get(weight, 0) + 1
                    stages[index] = room_s - each_s, mix
                    break
            else:
                stages.append((limit_s - each_s, {weight: 1}))
    return [mix for _, mix in stages]


@given(loads(), st.integers(1, 12), st.sampled_from([1, 2, 3, 100]))
def test_counting_is_first_fit(loads, limit_s, most):
    def may_be(mix):
        return sum(count for _, count in mix) <= most

    stacks, _ = first_fit(loads, float(limit_s), None if most == 100 else may_be)
    found = [dict(mix) for mix, count in stacks for _ in range(count)]
    assert found == one_by_one(loads, limit_s, most)


@given(loads(), st.integers(1, 12))
def test_up_to_the_next_limit_the_stages_stay_the_same(loads, limit_s):
    stacks, next_limit_s = first_fit(loads, float(limit_s))
    assert next_limit_s > limit_s
    if math.isfinite(next_limit_s):
        assert first_fit(loads, next_limit_s - 1e-3)[0] == stacks
        assert first_fit(loads, next_limit_s)[0] != stacks


@pytest.mark.parametrize(
    ("stacks", "starts"),
    [
        ([(((0, 1), (1, 2)), 1), (((0, 1),), 1)], [[0, 2, 3], [1]]),
        ([(((1, 1),), 2), (((0, 2),), 1)], [[2], [3], [0, 1]]),
    ],
)
def test_every_branch_is_in_one_stage(stacks, starts):
    runs = [ElementRun((place, place + 1), {}, kind=0) for place in range(4)]
    found = groups_of(stacks, {0: tuple(runs[:2]), 1: tuple(runs[2:])})
    assert [[run.start for run in group] for groups in found for group in groups] == starts
