"""The cheapest program that fits the memory, or a cheap one with a bound on what it lacks.

Counting memory exactly means to keep, at every step, all trade-offs of time and memory (labels with
several costs), which large models have too many of: every parameter may be kept whole or in shards.
There the memory gets a price instead (Lagrange multipliers; Everett, "Generalized Lagrange
Multiplier Method", Operations Research 1963): with a price ``p`` per byte the cheapest program of
``seconds + p * bytes`` is found as fast as without, and ``its cost - p * limit`` is less than any
program takes that fits. The price is bisected: the best program that fits is kept, and so is the
best bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lightning_gpp.spmd.costs.judge import evaluate_program
from lightning_gpp.spmd.costs.prices import Machine
from lightning_gpp.spmd.costs.share_cost import Vector
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.rules.theory import Theory
from lightning_gpp.spmd.search.find import (
    FoundProgram,
    NoProgramFitsError,
    SearchOptions,
    find_program,
)
from lightning_gpp.spmd.search.labels import TooManyExpansionsError

EXACT_EXPANSIONS = 300
"""A search that counts memory exactly gives up here: a few seconds."""

BISECTIONS = 12
"""Prices tried between one too low and one high enough: it is met to a part in a thousand."""


@dataclass(frozen=True, slots=True)
class FittingProgram:
    """A program that fits.

    Attributes:
        found: the program; its seconds are those that the judge gives.
        least_s: no program that fits takes less, with these shares.
    """

    found: FoundProgram
    least_s: float


def find_fitting(
    graph: SpmdGraph,
    machine: Machine,
    shares: tuple[tuple[float, ...], ...],
    options: SearchOptions,
    theory: Theory,
) -> FittingProgram:
    """The cheapest program that fits, or a cheap one.

    Args:
        graph: the model.
        machine: the devices.
        shares: one vector per segment.
        options: how it is searched, but for memory.
        theory: of the graph.

    Raises:
        NoProgramFitsError: no program fits, or none was found that does.
    """
    free = find_program(graph, machine, shares, options, theory)
    used = evaluate_program(free.program, graph, machine).memory_bytes
    if (used <= machine.memory_bytes).all():
        return FittingProgram(free, free.least_s)
    try:
        exact = replace(options, limits_memory=True, most_expansions=EXACT_EXPANSIONS)
        found = find_program(graph, machine, shares, exact, theory)
    except TooManyExpansionsError:
        return _Bisection(graph, machine, shares, options, theory, free.seconds).best()
    return FittingProgram(found, found.least_s)


class _Bisection:
    """The price of memory, between one too low and one high enough."""

    def __init__(
        self,
        graph: SpmdGraph,
        machine: Machine,
        shares: tuple[tuple[float, ...], ...],
        options: SearchOptions,
        theory: Theory,
        free_s: float,
    ) -> None:
        self._question = (graph, machine, shares)
        self._options = options
        self._theory = theory
        self._limits: Vector = np.where(
            np.isfinite(machine.memory_bytes), machine.memory_bytes, 0.0
        )
        self._counts: Vector = np.isfinite(machine.memory_bytes).astype(float)
        # At this price all memory there is costs as much as the whole step.
        self._unit_s = free_s / float(self._limits.sum())
        self._best: FoundProgram | None = None
        self._least_s = free_s

    def best(self) -> FittingProgram:
        """The cheapest that was met.

        Raises:
            NoProgramFitsError: none fits at any price.
        """
        low, high = 0.0, self._unit_s
        while not self._fits_at(high):
            low, high = high, high * 8
            if high > self._unit_s * HIGHEST:
                raise NoProgramFitsError(
                    "no program was found that fits the memory, even where memory counts for "
                    "more than time; use more or larger devices, a smaller batch, or an optimizer "
                    "with less state"
                )
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._fits_at(middle) else (middle, high)
        assert self._best is not None
        return FittingProgram(self._best, self._least_s)

    def _fits_at(self, price_s: float) -> bool:
        graph, machine, shares = self._question
        prices = self._counts * price_s
        options = replace(self._options, memory_price=tuple(prices.tolist()))
        found = find_program(graph, machine, shares, options, self._theory)
        self._least_s = max(self._least_s, found.seconds - float(prices @ self._limits))
        evaluation = evaluate_program(found.program, graph, machine)
        if not evaluation.fits(machine):
            return False
        if self._best is None or evaluation.price_s < self._best.seconds:
            self._best = replace(found, seconds=evaluation.price_s)
        return True


HIGHEST = 8**8
"""Times the first price: then a step's seconds no longer count beside its memory."""
