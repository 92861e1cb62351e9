"""The search for the bottleneck against all divisions of all small series-parallel models."""

from __future__ import annotations

import random

import pytest
from helpers.brute_force import (
    divisions,
    found_bottlenecks_s,
    is_in_space,
    random_request,
    shapes,
    smallest_bottleneck_s,
    tree_of,
)

SAMPLE = 40
"""Models of each size that are tried; all of them are in benchmarks/brute_force.py."""

WORST_LOSS = 1.5
"""How much longer the bottleneck may be than the best of divisions of any shape, in any model."""


def test_all_series_parallel_orders_are_enumerated():
    """Known numbers of series-parallel partial orders (OEIS A003430)."""
    assert [len(shapes(count)) for count in range(1, 8)] == [1, 2, 5, 15, 48, 167, 602]


@pytest.mark.parametrize("num_devices", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_the_search_finds_the_optimum_of_its_space(count, num_devices):
    rng = random.Random(100 * count + num_devices)
    all_shapes = shapes(count)
    for shape in rng.sample(all_shapes, min(SAMPLE, len(all_shapes))):
        tree = tree_of(shape)
        request = random_request(tree, num_devices, rng)
        everything = divisions(tree)
        considered = [stages for stages in everything if is_in_space(tree, stages)]
        found, in_line = found_bottlenecks_s(request)
        best = smallest_bottleneck_s(request, considered)
        assert found == pytest.approx(best, rel=1e-9), shape
        assert min(found, in_line) <= smallest_bottleneck_s(request, everything) * WORST_LOSS
