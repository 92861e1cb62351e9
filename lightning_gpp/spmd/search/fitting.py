"""The cheapest program that fits the memory, or a cheap one with a bound on what it lacks.

Counting memory exactly means to keep, at every step, all trade-offs of time and memory (labels with
several costs), which large models have too many of: every parameter may be kept whole or in shards.
There the memory gets a price instead (Lagrange multipliers; Everett, "Generalized Lagrange
Multiplier Method", Operations Research 1963): with a price ``p`` per byte the cheapest program of
``seconds + p * bytes`` is found as fast as without, and ``its cost - p * limit`` is less than any
program takes that fits. The next price is always the one at which the last program that fits and
the last one that does not cost the same (Handler and Zang, "A dual algorithm for the constrained
shortest path problem", Networks 1980); where none costs less there, no other price would help.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import numpy as np

from lightning_gpp.spmd.costs.judge import evaluate_program
from lightning_gpp.spmd.costs.prices import Machine
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.rules.theory import Theory
from lightning_gpp.spmd.search.find import (
    FoundProgram,
    NoProgramFitsError,
    SearchOptions,
    find_program,
)
from lightning_gpp.spmd.search.labels import TooManyExpansionsError
from lightning_gpp.units_of_measure import bytes_text

EXACT_EXPANSIONS = 300
"""A search that counts memory exactly gives up here: a few seconds. It needs at least about as many
as one that does not count it."""

MOST_PRICES = 12
"""Tried between one too low and one high enough; a few are enough."""


def find_fitting(
    graph: SpmdGraph,
    machine: Machine,
    shares: tuple[float, ...],
    options: SearchOptions,
    theory: Theory,
) -> FoundProgram:
    """The cheapest program that fits, or a cheap one: none that fits takes less than ``least_s``.

    Args:
        graph: the model.
        machine: the devices.
        shares: of the devices.
        options: how it is searched, but for memory.
        theory: of the graph.

    Raises:
        NoProgramFitsError: no program fits, or none was found that does.
    """
    free = find_program(graph, machine, shares, options, theory)
    used = evaluate_program(free.program, graph, machine).memory_bytes
    if (used <= machine.memory_bytes).all():
        return free
    if free.effort.expansions <= EXACT_EXPANSIONS:
        exact = replace(options, limits_memory=True, most_expansions=EXACT_EXPANSIONS)
        with contextlib.suppress(TooManyExpansionsError, NoProgramFitsError):
            return find_program(graph, machine, shares, exact, theory)
    return _Pricing(graph, machine, shares, options, theory).best(free)


def _too_large(leanest: FoundProgram, graph: SpmdGraph, machine: Machine) -> NoProgramFitsError:
    held = evaluate_program(leanest.program, graph, machine).memory_bytes
    device = int((held - machine.memory_bytes).argmax())
    return NoProgramFitsError(
        "no program was found that fits the memory: even the one that holds least needs "
        f"{bytes_text(held[device])} on device {device} (parameters with gradients and optimizer "
        f"state, and activations), which has {bytes_text(machine.memory_bytes[device])}; use more "
        "or larger devices, a smaller batch, or an optimizer with less state"
    )


@dataclass(frozen=True, slots=True)
class _Priced:
    """A program that costs least at some price of memory.

    Attributes:
        found: the program.
        seconds: of its instructions.
        memory_bytes: on all devices with a limit, together.
        fits: whether it fits every one of them.
    """

    found: FoundProgram
    seconds: float
    memory_bytes: float
    fits: bool

    def cost(self, price: float) -> float:
        """Seconds, with its memory at a price per byte."""
        return self.seconds + price * self.memory_bytes


class _Pricing:
    """Programs at prices of memory."""

    def __init__(
        self,
        graph: SpmdGraph,
        machine: Machine,
        shares: tuple[float, ...],
        options: SearchOptions,
        theory: Theory,
    ) -> None:
        self._question = (graph, machine, shares)
        self._options = options
        self._theory = theory
        self._has_limit = np.isfinite(machine.memory_bytes)
        self._limit_bytes = float(machine.memory_bytes[self._has_limit].sum())
        self._best: FoundProgram | None = None
        self._least_s = 0.0

    def best(self, free: FoundProgram) -> FoundProgram:
        """The cheapest that is met.

        Args:
            free: the cheapest program where memory costs nothing; it does not fit.

        Raises:
            NoProgramFitsError: none fits at any price.
        """
        self._least_s = free.least_s
        low, price = self._judged(free), free.seconds / self._limit_bytes
        highest = price * HIGHEST
        while not (high := self._at(price)).fits:
            low, price = high, price * 8
            if price > highest:
                raise _too_large(high.found, *self._question[:2])
        for _ in range(MOST_PRICES):
            if low.memory_bytes <= high.memory_bytes:
                break
            price = (high.seconds - low.seconds) / (low.memory_bytes - high.memory_bytes)
            found = self._at(price)
            if found.cost(price) >= high.cost(price) * (1 - TOLERANCE):
                break
            low, high = (low, found) if found.fits else (found, high)
        assert self._best is not None
        return replace(self._best, least_s=self._least_s)

    def _at(self, price: float) -> _Priced:
        """The cheapest program at a price per byte."""
        graph, machine, shares = self._question
        prices = tuple((price * self._has_limit).tolist())
        options = replace(self._options, memory_price=prices)
        found = find_program(graph, machine, shares, options, self._theory)
        self._least_s = max(self._least_s, found.least_s - price * self._limit_bytes)
        return self._judged(found)

    def _judged(self, found: FoundProgram) -> _Priced:
        graph, machine, _ = self._question
        evaluation = evaluate_program(found.program, graph, machine)
        fits = evaluation.fits(machine)
        if fits and (self._best is None or evaluation.price_s < self._best.seconds):
            self._best = replace(found, seconds=evaluation.price_s)
        memory_bytes = float(evaluation.memory_bytes[self._has_limit].sum())
        return _Priced(found, evaluation.price_s, memory_bytes, fits)


TOLERANCE = 1e-9
"""Relative; costs that are equal but for the order of their sums."""

HIGHEST = 8**8
"""Times the first price: then a step's seconds no longer count beside its memory."""
