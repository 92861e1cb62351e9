"""Lower bounds of devices leave out no division with fewer devices than those that are found."""

from __future__ import annotations

import math
import random

import pytest
from helpers.series_parallel import shapes, tree_of
from helpers.small_requests import SETTINGS, random_request

from lightning_gpp.planner.graphpipe.draft import UnitTables
from lightning_gpp.planner.graphpipe.partition import LimitedWays
from lightning_gpp.planner.graphpipe.space import Problem, Space

SAMPLE = 4
"""Models of each size and setting that are tried."""

FACTORS = (1.001, 1.1, 1.3, 2.0)
"""Limits, as multiples of what no division can beat."""


def fewest_devices(spaces: list[Space]) -> list[float]:
    """Fewest devices of the ways at some limits of each space; infinite where there are none."""
    return [
        min((space.usage.total(way.used) for way in ways), default=math.inf)
        for space in spaces
        for factor in FACTORS
        for ways in [LimitedWays(space, space.lower_bound_s * factor).ways()]
    ]


@pytest.mark.parametrize("setting", SETTINGS)
def test_searches_without_bounds_need_no_fewer_devices(setting, monkeypatch):
    rng = random.Random(setting)
    spaces = []
    for count in range(2, 8):
        for shape in rng.sample(shapes(count), min(SAMPLE, len(shapes(count)))):
            request = random_request(tree_of(shape), SETTINGS[setting], rng)
            problem = Problem(UnitTables(request))
            spaces += [problem.space(4), problem.space(2, take_turns=True)]
    bounded = fewest_devices(spaces)
    monkeypatch.setattr(LimitedWays, "_room", lambda self, _: self._space.usage.num_devices)
    free = fewest_devices(spaces)
    assert min(bounded) < math.inf
    assert all(one <= other for one, other in zip(bounded, free, strict=True))
