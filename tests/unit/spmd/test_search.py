"""The search finds the cheapest program there is."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
from helpers.spmd_brute_force import (
    brute_force_s,
    random_graph,
    random_machine,
    random_shares,
)

from lightning_gpp.graph import TensorSpec
from lightning_gpp.spmd.costs.machine import Machine
from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator, SpmdValue, ValueSource
from lightning_gpp.spmd.rules.theory import Theory
from lightning_gpp.spmd.search import find
from lightning_gpp.spmd.search.choices import Allowed
from lightning_gpp.spmd.search.factor_graph import FactorGraph
from lightning_gpp.spmd.search.find import NoProgramFitsError, find_program


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
    assert found.evaluation.price_s == expected
    assert found.least_s == pytest.approx(found.evaluation.price_s)


def test_what_is_too_wide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "MOST_ENTRIES", 1)
    with pytest.raises(ValueError, match="Name a part of the model with module="):
        find_program(*question(1))


def short_of_memory(graph: SpmdGraph, machine: Machine, shares: tuple[float, ...], part: float):
    """The machine with a part of the memory that the cheapest program needs."""
    free = find_program(graph, machine, shares)
    used = free.evaluation.memory_bytes
    return dataclasses.replace(machine, memory_bytes=np.maximum(used * part, 1.0))


@pytest.mark.parametrize("seed", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("part", [0.9, 0.6])
def test_a_price_of_memory_bounds_what_fits(seed: int, part: float) -> None:
    """Bound <= cheapest that fits <= what is found."""
    graph, machine, shares = question(seed)
    free = find_program(graph, machine, shares)
    limited = short_of_memory(graph, machine, shares, part)
    exact_s = brute_force_s(graph, limited, shares, limits=True)
    try:
        found = find_program(graph, limited, shares, limits_memory=True)
    except NoProgramFitsError:
        return  # prices may find none where there is one
    assert exact_s is not None
    assert found.evaluation.fits(limited)
    assert free.evaluation.price_s <= found.least_s * (1 + 1e-9)
    assert found.least_s <= exact_s * (1 + 1e-9)
    assert exact_s <= found.evaluation.price_s * (1 + 1e-9)


def towers(num_towers: int) -> SpmdGraph:
    """Tables side by side, whose rows are joined and read by a layer: a DLRM."""

    def spec(*shape: int, dtype: str = "float32") -> TensorSpec:
        return TensorSpec(shape, dtype)

    values, operators, joined = [], [], []
    for number in range(num_towers):
        index, table, rows, active = (f"{letter}{number}" for letter in "itrz")
        values += [
            SpmdValue(index, spec(64, dtype="int64"), ValueSource.INPUT, False),
            SpmdValue(table, spec(1000 * (number + 1), 16), ValueSource.PARAMETER, True),
            SpmdValue(rows, spec(64, 16), ValueSource.OPERATOR, True),
            SpmdValue(active, spec(64, 16), ValueSource.OPERATOR, True),
        ]
        operators += [
            SpmdOperator(rows, "embedding", (table, index), ("weight", "indices"), (rows,)),
            SpmdOperator(active, "relu", (rows,), ("self",), (active,)),
        ]
        joined.append(active)
    names = tuple(f"tensors[{number}]" for number in range(num_towers))
    width = 16 * num_towers
    values += [
        SpmdValue("x", spec(64, width), ValueSource.OPERATOR, True),
        SpmdValue("w", spec(8, width), ValueSource.PARAMETER, True),
        SpmdValue("y", spec(64, 8), ValueSource.OPERATOR, True),
    ]
    operators += [
        SpmdOperator("x", "cat", tuple(joined), names, ("x",), {"dim": 1}),
        SpmdOperator("y", "linear", ("x", "w"), ("input", "weight"), ("y",), flops=16e3 * width),
    ]
    return SpmdGraph(tuple(values), tuple(operators), ("y",))


def test_many_towers_are_searched_exactly() -> None:
    """Each is eliminated by itself, so 24 have tables no larger than two."""
    draw = random.Random(0)
    machine, shares = random_machine(draw, 2), random_shares(draw, 2)
    graph = towers(24)
    found = find_program(graph, machine, shares)
    assert found.least_s == pytest.approx(found.evaluation.price_s)
    search = FactorGraph(Theory(graph, 2), machine, shares, Allowed())
    scopes = [factor.variables for factor in search.factors]
    sizes = [
        math.prod(search.sizes[each] for each in scope)
        for scope in find.elimination_order(search.sizes, scopes)
    ]
    assert max(sizes) < 1000
