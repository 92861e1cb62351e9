"""The cheapest values of the variables of a factor graph: by elimination, or as a 0-1 program.

*Elimination.* The costs that a variable is in are added up to a table over its neighbours, of which
only the best value of the variable is kept (non-serial dynamic programming, Bertele and Brioschi
1972; bucket elimination, Dechter 1999). Variables go in the order in which the next table is
smallest: a graph that is narrow has small tables, and so has one of many towers side by side, each
of which is eliminated by itself. Equal layers have equal tables, which are computed once.

*A 0-1 program*, where memory counts exactly, or tables would be too large. Every cost is a column
that says whether it is paid. The costs that a variable is in agree on its value, and in a class of
devices the bytes of all that are paid are within the limit::

    minimise    sum_c seconds_c * x_c
    subject to  sum_{c of f} x_c = 1                                  every factor f
                sum_{c of f, v = d} x_c = sum_{c of g, v = d} x_c     every variable v of f and g
                sum_c bytes_kc * x_c <= limit_k                       every class k

Without limits its relaxation is whole on the published models, but takes HiGHS twenty to seventy
times as long as elimination (5 s for ViT-48).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from lightning_gpp.spmd.costs.machine import Vector
from lightning_gpp.spmd.search.factor_graph import FactorCosts, FactorGraph, ProgramAnswer

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


MOST_NODES = 10_000
"""Of the branch and bound."""

INFEASIBLE = 2
"""SciPy's status."""

TOLERANCE = 1e-5
"""Part of the memory that is left, first none: HiGHS may take a millionth more than there is."""


def cheapest(
    factor_graph: FactorGraph, byte_s: Vector, limits: Vector | None = None
) -> tuple[ProgramAnswer, float] | None:
    """The cheapest program, and what none costs less than; None if none fits.

    Args:
        factor_graph: the choice.
        byte_s: price of a byte per class.
        limits: of memory per class.

    Raises:
        RuntimeError: none was found before the branch and bound was ended.
    """
    every = [factor.costs for factor in factor_graph.factors]
    seconds = np.concatenate([costs.priced(byte_s) for costs in every])
    constraints = [_one_each(factor_graph)]
    if limits is not None:
        memory = np.concatenate([costs.memory_bytes for costs in every])
        constraints.append(LinearConstraint((memory / limits).T, ub=1.0))
    scale = seconds.max() / 1e3 or 1.0  # HiGHS takes sums that differ by a millionth for equal
    solved = milp(
        seconds / scale,
        integrality=np.ones(len(seconds)),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"node_limit": MOST_NODES, "mip_rel_gap": 0.0},
    )
    if solved.status == INFEASIBLE:
        return None
    if solved.x is None:
        raise RuntimeError(
            f"no program was found by the solver ({solved.message}); divide less of the model: "
            "name a part of it with module="
        )
    ends = np.cumsum([len(costs.seconds) for costs in every])
    paid = np.flatnonzero(solved.x > 0.5) - np.array([0, *ends[:-1]])
    values = [0] * len(factor_graph.sizes)
    for factor, number in zip(factor_graph.factors, paid, strict=True):
        for variable, value in zip(factor.variables, factor.costs.places[number]):
            values[variable] = int(value)
    answer = ProgramAnswer.of(factor_graph, values, paid.tolist())
    if limits is factor_graph.limits and not answer.fits:
        return cheapest(factor_graph, byte_s, limits * (1 - TOLERANCE))
    return answer, solved.mip_dual_bound * scale


def _one_each(factor_graph: FactorGraph) -> LinearConstraint:
    """One cost of every factor, which agree on the values of variables."""
    first: dict[int, tuple[NDArray[np.intp], NDArray[np.intp]]] = {}
    entries: list[tuple[NDArray[np.intp], NDArray[np.intp], float]] = []
    num_rows, start = len(factor_graph.factors), 0
    for number, factor in enumerate(factor_graph.factors):
        columns = start + np.arange(len(factor.costs.seconds))
        start += len(columns)
        entries.append((np.full(len(columns), number), columns, 1.0))
        for variable, places in zip(factor.variables, factor.costs.places.T):
            known, others = first.setdefault(variable, (places, columns))
            if others is not columns:
                entries.append((num_rows + places, columns, 1.0))
                entries.append((num_rows + known, others, -1.0))
                num_rows += factor_graph.sizes[variable]
    rows, columns = (np.concatenate([entry[part] for entry in entries]) for part in (0, 1))
    signs = np.concatenate([np.full(len(entry[0]), entry[2]) for entry in entries])
    right = (np.arange(num_rows) < len(factor_graph.factors)).astype(float)
    matrix = coo_array((signs, (rows, columns)), shape=(num_rows, start)).tocsr()
    return LinearConstraint(matrix, right, right)
