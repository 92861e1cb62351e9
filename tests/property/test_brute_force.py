"""The search for the bottleneck against all divisions of small series-parallel models."""

from __future__ import annotations

import random

import pytest
from helpers.brute_force import INFEASIBLE, BruteForce, found_bottleneck_s, line_divisions
from helpers.series_parallel import divisions, final_stages, shapes, tree_of
from helpers.small_requests import HOLDING_ALL, SETTINGS, Setting, random_request

from lightning_gpp.planner import answer, evaluate_plan

ALL_SETTINGS = SETTINGS | HOLDING_ALL

SAMPLE = 6
"""Models of each size and setting that are tried."""

WORST_LOSS = 1.6
"""How much longer the bottleneck may be than the best of divisions of any shape, in any model."""

SPACES = [(4, False), (2, True)]
"""Smallest micro-batch, and whether replicas take turns."""


def test_all_series_parallel_orders_are_enumerated():
    """Known numbers of series-parallel partial orders (OEIS A003430)."""
    assert [len(shapes(count)) for count in range(1, 8)] == [1, 2, 5, 15, 48, 167, 602]


@pytest.mark.parametrize("setting", [one for one in ALL_SETTINGS if ALL_SETTINGS[one].has_memory])
def test_a_plan_is_found_where_a_division_of_the_line_fits(setting):
    rng = random.Random(setting)
    outcomes = set()
    for count in range(1, 6):
        all_shapes = shapes(count)
        for shape in rng.sample(all_shapes, min(SAMPLE, len(all_shapes))):
            request = random_request(tree_of(shape), ALL_SETTINGS[setting], rng)
            considered = line_divisions(request)
            fits = any(
                BruteForce(request, size, take_turns=turns, in_line=True).smallest_bottleneck_s(
                    considered
                )
                < INFEASIBLE
                for size, turns in SPACES
            )
            outcomes.add(fits)
            if fits:
                plan = answer(request, "graphpipe_exclusive")
                assert evaluate_plan(plan, request).is_feasible
    assert outcomes == {True, False}


@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_little_is_lost_against_divisions_of_any_shape(num_devices):
    rng = random.Random(num_devices)
    setting = Setting("a" * num_devices)
    for count in range(1, 7):
        for shape in rng.sample(shapes(count), min(SAMPLE, len(shapes(count)))):
            tree = tree_of(shape)
            request = random_request(tree, setting, rng)
            everything = [(stages, final_stages(tree, stages)) for stages in divisions(tree)]
            best_s = BruteForce(request, 4).smallest_bottleneck_s(everything)
            assert found_bottleneck_s(request, 4) <= best_s * WORST_LOSS
