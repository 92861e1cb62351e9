"""The search finds the cheapest program there is."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from helpers.spmd_brute_force import (
    brute_force_s,
    random_graph,
    random_machine,
    random_shares,
)

from lightning_gpp.spmd.costs.judge import evaluate_program
from lightning_gpp.spmd.rules.theory import Theory
from lightning_gpp.spmd.search import fitting
from lightning_gpp.spmd.search.find import NoProgramFitsError, SearchOptions, find_program


def question(seed: int):
    draw = random.Random(seed)
    graph = random_graph(draw, draw.choice((2, 3)))
    return graph, random_machine(draw, 2), random_shares(draw, 2)


SLOW = {4, 5, 7, 8, 9, 12, 17, 18, 20, 21}
"""Questions on which trying everything takes more than 5 s; they were compared once."""


@pytest.mark.parametrize("seed", sorted({*range(24)} - SLOW))
def test_the_search_is_optimal(seed: int) -> None:
    """The judge agrees with the search."""
    graph, machine, shares = question(seed)
    expected = pytest.approx(brute_force_s(graph, machine, shares, limits=False))
    found = find_program(graph, machine, shares)
    assert found.seconds == expected
    assert evaluate_program(found.program, graph, machine).price_s == expected


@pytest.mark.parametrize("seed", range(8))
def test_a_beam_says_how_far_off_it_is_at_most(seed: int) -> None:
    """Its program is a valid one, judged as it says, and what nothing is below of is."""
    graph, machine, shares = question(seed)
    exact = find_program(graph, machine, shares)
    options = SearchOptions(most_labels=1, beam=1)
    found = find_program(graph, machine, shares, options)
    assert exact.least_s == exact.seconds and not exact.effort.dropped
    assert found.least_s <= exact.seconds * (1 + 1e-9)
    assert exact.seconds <= found.seconds * (1 + 1e-9)
    step_s = evaluate_program(found.program, graph, machine).price_s
    assert step_s == pytest.approx(found.seconds, rel=1e-9)
    assert (found.least_s < found.seconds) <= (found.effort.dropped > 0)


@pytest.mark.parametrize("seed", [1, 2, 3, 5, 6])
def test_the_search_is_optimal_where_memory_is_short(seed: int) -> None:
    graph, machine, shares = question(seed)
    free = find_program(graph, machine, shares)
    used = evaluate_program(free.program, graph, machine).memory_bytes
    for part in (0.9, 0.6):
        limited = dataclasses.replace(machine, memory_bytes=np.maximum(used * part, 1.0))
        expected = brute_force_s(graph, limited, shares, limits=True)
        options = SearchOptions(limits_memory=True)
        if expected is None:
            with pytest.raises(NoProgramFitsError, match="no program fits"):
                find_program(graph, limited, shares, options)
            continue
        found = find_program(graph, limited, shares, options)
        assert found.seconds == pytest.approx(expected)
        evaluation = evaluate_program(found.program, graph, limited)
        assert evaluation.fits(limited)
        assert evaluation.price_s == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(12))
def test_a_price_of_memory_bounds_what_fits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound <= cheapest that fits <= what is found."""
    monkeypatch.setattr(fitting, "EXACT_EXPANSIONS", 0)
    graph, machine, shares = question(seed)
    free = find_program(graph, machine, shares)
    used = evaluate_program(free.program, graph, machine).memory_bytes
    theory = Theory(graph, 2)
    for part in (0.95, 0.7):
        limited = dataclasses.replace(machine, memory_bytes=np.maximum(used * part, 1.0))
        try:
            found = fitting.find_fitting(graph, limited, shares, SearchOptions(), theory)
        except NoProgramFitsError:
            continue
        exact = find_program(graph, limited, shares, SearchOptions(limits_memory=True))
        assert evaluate_program(found.program, graph, limited).fits(limited)
        assert free.seconds <= found.least_s * (1 + 1e-9)
        assert found.least_s <= exact.seconds * (1 + 1e-9)
        assert exact.seconds <= found.seconds * (1 + 1e-9)
