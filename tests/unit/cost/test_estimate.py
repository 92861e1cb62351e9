from __future__ import annotations

import pytest
from helpers.graphs import MICROBATCH_SIZE, literal_graph

from lightning_gpp.cost import ESTIMATED, OpProfile, estimate_profile

GRAPH = literal_graph({"a": "x", "add()": "a x"})


def test_an_estimate_says_so():
    assert estimate_profile(GRAPH).device == ESTIMATED


def test_costs_grow_with_the_bytes_that_are_touched():
    costs = estimate_profile(GRAPH).operators
    tensor, weight = 4 * 16 * 4, 1000
    ratio = costs["a"].forward_s / costs["add"].forward_s
    assert ratio == pytest.approx((2 * tensor + weight) / (3 * tensor))
    assert costs["a"].backward_s == 2 * costs["a"].forward_s
    assert costs["a"].activation_bytes == tensor


def test_the_microbatch_size_is_read_from_the_inputs():
    assert estimate_profile(GRAPH).microbatch_size == MICROBATCH_SIZE


def test_negative_costs_are_refused():
    with pytest.raises(ValueError, match="costs cannot be negative"):
        OpProfile(forward_s=-1.0)
