"""The values of variables that cost least in all, by elimination of one variable after the other.

The costs that a variable is in are added up to a table over its neighbours, of which only the best
value of the variable is kept (non-serial dynamic programming, Bertele and Brioschi 1972; bucket
elimination, Dechter 1999). Variables go in the order in which the next table is smallest: a graph
that is narrow has small tables, and so has one of many towers side by side, each of which is
eliminated by itself. Equal layers have equal tables, which are computed once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from lightning_gpp.spmd.costs.share_cost import Vector
from lightning_gpp.spmd.search.factor_graph import FactorCosts

Scope = tuple[int, ...]
"""Variables that a table is by, in its axes' order."""

MOST_ENTRIES = 10_000_000
"""Of a table. The published models have 85,840; this many take 80 MB, and tenths of a second."""


def elimination_order(sizes: Sequence[int], scopes: Iterable[Scope]) -> list[Scope] | None:
    """Variables in the order in which they go, each with its neighbours at that time.

    Args:
        sizes: numbers of values of the variables.
        scopes: of the tables.

    Returns:
        None where a table would have more than :data:`MOST_ENTRIES`.
    """
    neighbours: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for variable in scope:
            neighbours[variable].update(scope)

    def entries(variable: int) -> int:
        return math.prod(sizes[each] for each in {variable, *neighbours[variable]})

    heap = [(entries(variable), variable) for variable, size in enumerate(sizes) if size > 1]
    heapq.heapify(heap)
    order: dict[int, Scope] = {}
    while heap:
        known, variable = heapq.heappop(heap)
        if variable in order or known != entries(variable):
            continue  # it went, or waits in the heap with another number as well
        if known > MOST_ENTRIES:
            return None
        others = neighbours[variable] - {variable}
        order[variable] = (variable, *sorted(others))
        for other in others:
            neighbours[other] = (neighbours[other] | others) - {variable}
            heapq.heappush(heap, (entries(other), other))
    return list(order.values())


def cheapest_values(
    order: Sequence[Scope], tables: Iterable[tuple[Scope, Vector]], num_variables: int
) -> tuple[list[int], float]:
    """The value of every variable, and what all cost together.

    Args:
        order: see :func:`elimination_order`.
        tables: costs; infinite where they cannot be paid. Tables that are alike are one array.
        num_variables: of all; those without a choice are in no table.
    """
    turn = {scope[0]: number for number, scope in enumerate(order)}
    waiting: list[list[tuple[Scope, Vector]]] = [[] for _ in (*order, None)]
    known: dict[Hashable, tuple[Vector, np.ndarray]] = {}

    def wait(scope: Scope, table: Vector) -> None:
        waiting[min((turn[variable] for variable in scope), default=-1)].append((scope, table))

    for scope, table in tables:
        wait(scope, table)
    best: list[np.ndarray] = []
    for scope, group in zip(order, waiting):
        placed = [(tuple(map(scope.index, own)), table) for own, table in group]
        key = tuple((own, id(table)) for own, table in placed)
        if key not in known:
            together: Vector = sum(_along(table, own, len(scope)) for own, table in placed)  # type: ignore[assignment]
            known[key] = together.min(axis=0), together.argmin(axis=0)
        least, which = known[key]
        best.append(which)
        wait(scope[1:], least)
    values = [0] * num_variables
    for (variable, *others), which in zip(reversed(order), reversed(best)):
        values[variable] = int(which[tuple(values[other] for other in others)])
    return values, sum(float(table) for _, table in waiting[-1])


def _along(table: Vector, axes: tuple[int, ...], num_axes: int) -> Vector:
    """A table with its axes where they belong, and axes of length 1 for the others."""
    found = table.transpose(np.argsort(axes))
    return np.expand_dims(found, tuple({*range(num_axes)} - {*axes}))


def table_of(costs: FactorCosts, byte_s: Vector) -> Vector:
    """The least cost of every combination of values, with bytes at a price per class."""
    table = np.full(costs.shape, np.inf)
    np.minimum.at(table, tuple(costs.places.T), costs.priced(byte_s))
    return table.squeeze()
