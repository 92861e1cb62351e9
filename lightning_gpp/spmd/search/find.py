"""The cheapest program for given shares.

Without limits of memory variables are eliminated one by one, which is exact. Where the cheapest
program does not fit, small models have memory counted exactly, by a 0-1 program. In large ones,
where every parameter may be kept whole or in shards, memory gets a price instead (Lagrange
multipliers; Everett, "Generalized Lagrange Multiplier Method", Operations Research 1963): with a
price ``p`` per byte the cheapest program of ``seconds + p * bytes`` is found as fast as without,
and ``its cost - p * limit`` is less than any program takes that fits. The next price is always the
one at which the last program that fits and the last one that does not cost the same (Handler and
Zang, "A dual algorithm for the constrained shortest path problem", Networks 1980); where none costs
less there, no other price would help.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_gpp.common.units_of_measure import bytes_text
from lightning_gpp.spmd.costs.machine import Machine
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.program import SpmdProgram
from lightning_gpp.spmd.rules.theory import Theory
from lightning_gpp.spmd.search.factor_graph import FactorGraph, ProgramAnswer
from lightning_gpp.spmd.search.limits import Allowed
from lightning_gpp.spmd.search.solve import cheapest, cheapest_values, elimination_order, table_of

MOST_COLUMNS = 5_000
"""Of a 0-1 program with limits of memory, which takes a second or two then."""

MOST_PRICES = 12
"""Tried between one too low and one high enough; a few are enough."""

TOLERANCE = 1e-9
"""Relative; costs that are equal but for the order of their sums."""

HIGHEST = 8**8
"""Times the first price: then a step's seconds no longer count beside its memory."""


@dataclass(frozen=True, slots=True)
class FoundProgram:
    """What a search found.

    Attributes:
        program: the cheapest program.
        seconds: what it costs.
        least_s: no program costs less; less than ``seconds`` only where memory is short.
    """

    program: SpmdProgram
    seconds: float
    least_s: float


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
) -> FoundProgram:
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
    """
    theory = theory or Theory(graph, machine.num_devices)
    search = _PricedSearch(FactorGraph(theory, machine, shares, allowed or Allowed()))
    answer, least_s = search.at(0.0)
    if limits_memory and not answer.fits:
        answer, least_s = search.fitting(answer, least_s)
    return FoundProgram(search.factor_graph.program(answer, name), answer.seconds, least_s)


class _PricedSearch:
    """Answers at prices of memory.

    Args:
        factor_graph: the choice of a program.
    """

    def __init__(self, factor_graph: FactorGraph) -> None:
        self.factor_graph = factor_graph
        has_choice = [size > 1 for size in factor_graph.sizes]
        self._scopes = [
            tuple(each for each in factor.variables if has_choice[each])
            for factor in factor_graph.factors
        ]
        self._order = elimination_order(factor_graph.sizes, self._scopes)

    def at(self, price: float) -> tuple[ProgramAnswer, float]:
        """The cheapest program with a price per byte, and what none costs less than.

        Args:
            price: of a byte on any device with a limit.
        """
        factor_graph, byte_s = self.factor_graph, price * self.factor_graph.num_alike
        if self._order is None:
            found = cheapest(factor_graph, byte_s)
            assert found is not None, "every program is one that may be had"
            return found
        every = {id(factor.costs): factor.costs for factor in factor_graph.factors}
        tables = {key: table_of(costs, byte_s) for key, costs in every.items()}
        placed = [(s, tables[id(f.costs)]) for s, f in zip(self._scopes, factor_graph.factors)]
        values, total_s = cheapest_values(self._order, placed, len(factor_graph.sizes))
        paid = []
        for factor in factor_graph.factors:
            own = [values[variable] for variable in factor.variables]
            numbers = np.flatnonzero((factor.costs.places == own).all(axis=1))
            paid.append(int(numbers[factor.costs.priced(byte_s)[numbers].argmin()]))
        return ProgramAnswer.of(factor_graph, values, paid), total_s

    def fitting(self, free: ProgramAnswer, least_s: float) -> tuple[ProgramAnswer, float]:
        """The cheapest program that fits, or a cheap one, and what none is below of.

        Args:
            free: the cheapest program where memory costs nothing; it does not fit.
            least_s: nothing is below of that.

        Raises:
            NoProgramFitsError: none fits, or none was found that does.
        """
        limits = self.factor_graph.limits
        limit_bytes = float(self.factor_graph.num_alike @ limits)
        price = free.seconds / limit_bytes
        highest = price * HIGHEST
        num_columns = sum(len(factor.costs.seconds) for factor in self.factor_graph.factors)
        if self._order is None or num_columns <= MOST_COLUMNS:
            found = cheapest(self.factor_graph, np.zeros(len(limits)), limits)
            if found is None:
                raise self._too_large(self.at(highest)[0])
            return found
        fitting: list[ProgramAnswer] = []

        def at(price: float) -> ProgramAnswer:
            nonlocal least_s
            answer, total_s = self.at(price)
            least_s = max(least_s, total_s - price * limit_bytes)
            fitting.extend([answer] if answer.fits else [])
            return answer

        low, high = free, at(price)
        while not high.fits:
            low, price = high, price * 8
            if price >= highest:
                raise self._too_large(high)
            high = at(price)
        for _ in range(MOST_PRICES):
            if low.held_bytes <= high.held_bytes:
                break
            price = (high.seconds - low.seconds) / (low.held_bytes - high.held_bytes)
            answer = at(price)
            if answer.cost_s(price) >= high.cost_s(price) * (1 - TOLERANCE):
                break
            low, high = (low, answer) if answer.fits else (answer, high)
        return min(fitting, key=lambda each: each.seconds), least_s

    def _too_large(self, leanest: ProgramAnswer) -> NoProgramFitsError:
        limits = self.factor_graph.limits
        worst = int((leanest.memory_bytes - limits).argmax())
        device = self.factor_graph.classes[worst]
        return NoProgramFitsError(
            "no program was found that fits the memory: even the one that holds least needs "
            f"{bytes_text(leanest.memory_bytes[worst])} on device {device} "
            "(parameters with gradients and optimizer state, and activations), which has "
            f"{bytes_text(limits[worst])}; use more or larger devices, a smaller batch, or an "
            "optimizer with less state"
        )
