"""Finds the cheapest program for given shares, by eliminating variables.

*Elimination.* The costs that a variable is in are added up to a table over its neighbours, of which
only the best value of the variable is kept (non-serial dynamic programming, Bertele and Brioschi
1972; bucket elimination, Dechter 1999). Variables go in the order in which the next table is
smallest: a graph that is narrow has small tables, and so has one of many towers side by side, each
of which is eliminated by itself. Equal layers have equal tables, which are computed once.

*A price of memory*, where it is short (Lagrange multipliers; Everett, "Generalized Lagrange
Multiplier Method", Operations Research 1963): with a price ``p`` per byte the cheapest program of
``seconds + p * bytes`` is found as fast as without, and ``its cost - p * limit`` is less than any
program takes that fits. The next price is always the one at which the last program that fits and
the last one that does not cost the same (Handler and Zang, "A dual algorithm for the constrained
shortest path problem", Networks 1980); where none costs less there, no other price would help.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_gpp.common.units_of_measure import bytes_text
from lightning_gpp.spmd.costs.machine import Machine, Vector
from lightning_gpp.spmd.costs.prices import ProgramEvaluation, evaluate_program
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.program import SpmdProgram
from lightning_gpp.spmd.rules.theory import Theory
from lightning_gpp.spmd.search.choices import Allowed
from lightning_gpp.spmd.search.factor_graph import FactorCosts, FactorGraph

MOST_PRICES = 12
"""Tried between one too low and one high enough; a few are enough."""

SAME = 1e-9
"""Relative; costs that are equal but for the order of their sums."""

HIGHEST = 8**8
"""Times the first price: then a step's seconds no longer count beside its memory."""


@dataclass(frozen=True, slots=True, eq=False)
class SpmdPlan:
    """A program and its predicted costs.

    Attributes:
        program: with its shares.
        evaluation: what it takes.
        least_s: no program has a smaller price with these shares. None where the program was found
            with other shares.
    """

    program: SpmdProgram
    evaluation: ProgramEvaluation
    least_s: float | None


class NoProgramFitsError(ValueError):
    """Every program needs more memory than some device has."""


def find_program(
    graph: SpmdGraph,
    machine: Machine,
    shares: tuple[float, ...],
    theory: Theory | None = None,
    *,
    allowed: Allowed | None = None,
    limits_memory: bool = False,
    name: str = "hap",
) -> SpmdPlan:
    """The cheapest program of the theory, by the judge's prices.

    Args:
        graph: the model.
        machine: the devices.
        shares: of the devices.
        theory: of the graph, where it has been made before.
        allowed: what the program is limited to.
        limits_memory: whether every device's memory has to be enough.
        name: of the program.

    Raises:
        NoProgramFitsError: no program fits the memory, or none was found that does.
        ValueError: the model is too wide to be searched.
    """
    theory = theory or Theory(graph, machine.num_devices)
    search = _PricedSearch(FactorGraph(theory, machine, shares, allowed or Allowed()), name)
    found = search.at(0.0)
    if limits_memory and not found.evaluation.fits(machine):
        return search.fitting(found)
    return found


class _PricedSearch:
    """The cheapest programs at prices of memory.

    Args:
        factor_graph: the choice of a program.
        name: of the programs.
    """

    def __init__(self, factor_graph: FactorGraph, name: str) -> None:
        self._factor_graph, self._name = factor_graph, name
        self._machine = factor_graph.prices.machine
        self._limited = np.isfinite(self._machine.memory_bytes)
        has_choice = [size > 1 for size in factor_graph.sizes]
        self._scopes = [
            tuple(each for each in factor.variables if has_choice[each])
            for factor in factor_graph.factors
        ]
        self._order = elimination_order(factor_graph.sizes, self._scopes)

    def _held_bytes(self, plan: SpmdPlan) -> float:
        """On all devices with a limit together."""
        return float(plan.evaluation.memory_bytes[self._limited].sum())

    def at(self, byte_s: float) -> SpmdPlan:
        """The cheapest program with a price per byte on any device with a limit.

        With it what no program costs less than, its bytes included.
        """
        graph = self._factor_graph
        every = {id(factor.costs): factor.costs for factor in graph.factors}
        tables = {key: table_of(costs, byte_s) for key, costs in every.items()}
        placed = [(s, tables[id(f.costs)]) for s, f in zip(self._scopes, graph.factors)]
        values, total_s = cheapest_values(self._order, placed, len(graph.sizes))
        paid: list[int] = []
        for factor in graph.factors:
            costs, own = factor.costs, [values[variable] for variable in factor.variables]
            numbers = np.flatnonzero((costs.places == own).all(axis=1))
            paid.append(int(numbers[costs.priced(byte_s)[numbers].argmin()]))
        program = graph.program(paid, self._name)
        return SpmdPlan(program, evaluate_program(program, graph.graph, self._machine), total_s)

    def fitting(self, free: SpmdPlan) -> SpmdPlan:
        """The cheapest program that fits, or a cheap one.

        Args:
            free: the cheapest program where memory costs nothing; it does not fit.

        Raises:
            NoProgramFitsError: none fits, or none was found that does.
        """
        limits = self._machine.memory_bytes
        limit_bytes = float(limits[self._limited].sum())
        price, least_s = free.evaluation.price_s / limit_bytes, free.least_s or 0.0
        highest = price * HIGHEST
        fitting: list[SpmdPlan] = []

        def at(price: float) -> tuple[SpmdPlan, bool]:
            """The cheapest program, and whether it fits."""
            nonlocal least_s
            plan = self.at(price)
            least_s = max(least_s, (plan.least_s or 0.0) - price * limit_bytes)
            fits = plan.evaluation.fits(self._machine)
            fitting.extend([plan] if fits else [])
            return plan, fits

        low, (high, fits) = free, at(price)
        while not fits:
            low, price = high, price * 8
            if price >= highest:
                raise _too_large(high.evaluation.memory_bytes, limits)
            high, fits = at(price)
        for _ in range(MOST_PRICES):
            saved_bytes = self._held_bytes(low) - self._held_bytes(high)
            if saved_bytes <= 0:
                break
            price = (high.evaluation.price_s - low.evaluation.price_s) / saved_bytes
            found, fits = at(price)
            cost_s, high_s = (
                each.evaluation.price_s + price * self._held_bytes(each) for each in (found, high)
            )
            if cost_s >= high_s * (1 - SAME):
                break
            low, high = (low, found) if fits else (found, high)
        best = min(fitting, key=lambda each: each.evaluation.price_s)
        return replace(best, least_s=least_s)


def _too_large(memory_bytes: Vector, limits: Vector) -> NoProgramFitsError:
    device = int((memory_bytes - limits).argmax())
    return NoProgramFitsError(
        "no program was found that fits the memory: even the one that holds least needs "
        f"{bytes_text(memory_bytes[device])} on device {device} "
        "(parameters with gradients and optimizer state, and activations), which has "
        f"{bytes_text(limits[device])}; use more or larger devices, a smaller batch, or an "
        "optimizer with less state"
    )


# Elimination ------------------------------------------------------------------------------------

Scope = tuple[int, ...]
"""Variables that a table is by, in its axes' order."""

MOST_ENTRIES = 10_000_000
"""Of a table. The published models have 85,840; this many take 80 MB, and tenths of a second."""


def elimination_order(sizes: Sequence[int], scopes: Iterable[Scope]) -> list[Scope]:
    """Variables in the order in which they go, each with its neighbours at that time.

    Args:
        sizes: numbers of values of the variables.
        scopes: of the tables.

    Raises:
        ValueError: a table would have more than :data:`MOST_ENTRIES`.
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
            raise ValueError(
                f"the search would need a table of {known} entries, more than {MOST_ENTRIES}, "
                "because many operators read the results of many earlier ones (as in a DenseNet). "
                "Name a part of the model with module=, or use "
                'planner="data_parallel" or strategy="graphpipe"'
            )
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


def table_of(costs: FactorCosts, byte_s: float) -> Vector:
    """The least cost of every combination of values, with bytes at a price."""
    table = np.full(costs.shape, np.inf)
    np.minimum.at(table, tuple(costs.places.T), costs.priced(byte_s))
    return table.squeeze()
