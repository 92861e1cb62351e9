"""The program of a model on devices of unequal speed: search and shares in turn.

The cheapest program depends on the shares and the best shares on the program. HAP takes turns until
nothing improves; here the best *pair* is kept (the release keeps a program with the shares of the
next, rejected one), and the turns begin from shares in proportion to the speeds, and from even
ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_gpp.spmd.costs.judge import ProgramEvaluation, evaluate_program
from lightning_gpp.spmd.costs.prices import Machine
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.program import SpmdProgram
from lightning_gpp.spmd.ratios import best_shares
from lightning_gpp.spmd.rules.theory import Theory
from lightning_gpp.spmd.search.find import (
    FoundProgram,
    NoProgramFitsError,
    SearchOptions,
    find_program,
)
from lightning_gpp.spmd.search.fitting import find_fitting
from lightning_gpp.spmd.search.limits import Allowed, DataParallel, ShardedDataParallel

MOST_TURNS = 8
"""Turns of search and shares; the published models need two or three."""

Shares = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class SpmdPlan:
    """A program with its prediction.

    Attributes:
        program: with its shares.
        evaluation: what it takes.
        tried: all programs with shares that were met on the way, cheapest first.
        least_s: no program takes less with these shares; less than the program takes only where
            memory is short and the model large.
        expansions: labels that were continued in all searches.
    """

    program: SpmdProgram
    evaluation: ProgramEvaluation
    tried: tuple[tuple[SpmdProgram, float], ...]
    least_s: float
    expansions: int

    @property
    def gap(self) -> float:
        """At most this part of the step's time could be saved with these shares."""
        return (
            max(0.0, 1 - self.least_s / self.evaluation.step_s) if self.evaluation.step_s else 0.0
        )


def plan_hap(graph: SpmdGraph, machine: Machine, *, allowed: Allowed | None = None) -> SpmdPlan:
    """The best pair of program and shares that is found; it fits the memory of all devices.

    Args:
        graph: the model.
        machine: the devices.
        allowed: what the search is limited to.

    Raises:
        NoProgramFitsError: no program fits the memory of all devices.
    """
    theory = Theory(graph, machine.num_devices)
    options = SearchOptions(allowed=allowed or Allowed())
    pairs = _Pairs(graph, machine)
    refused: NoProgramFitsError | None = None
    even = (1 / machine.num_devices,) * machine.num_devices
    for start in dict.fromkeys((machine.speeds.shares, even)):
        shares: Shares = (start,)
        for _ in range(MOST_TURNS):
            try:
                fitting = find_fitting(graph, machine, shares, options, theory)
            except NoProgramFitsError as error:
                refused = error
                break
            pairs.add(fitting.found.program, fitting.least_s)
            pairs.expansions += fitting.found.effort.expansions
            better = best_shares(fitting.found.program, graph, machine)
            if better in pairs.shares:
                break
            pairs.add(replace(fitting.found.program, shares=better), 0.0)
            shares = better
    if not pairs.tried:
        assert refused is not None
        raise refused
    return pairs.best(lambda shares: find_fitting(graph, machine, shares, options, theory).least_s)


class _Pairs:
    """Programs with shares, as they were met."""

    def __init__(self, graph: SpmdGraph, machine: Machine) -> None:
        self._graph = graph
        self._machine = machine
        self.tried: list[tuple[SpmdProgram, ProgramEvaluation, float]] = []
        self.expansions = 0

    @property
    def shares(self) -> set[Shares]:
        """All shares that were searched with."""
        return {program.shares for program, _, least_s in self.tried if least_s}

    def add(self, program: SpmdProgram, least_s: float) -> None:
        """A program that fits; others are left out.

        Args:
            program: with its shares.
            least_s: bound of the search with these shares; 0 where there was none.
        """
        evaluation = evaluate_program(program, self._graph, self._machine)
        if evaluation.fits(self._machine):
            self.tried.append((program, evaluation, least_s))

    def best(self, bound_s: Callable[[Shares], float]) -> SpmdPlan:
        """The cheapest pair.

        Args:
            bound_s: least seconds with given shares, where the best pair was not searched.
        """
        ranked = sorted(self.tried, key=lambda pair: pair[1].step_s)
        program, evaluation, least_s = ranked[0]
        return SpmdPlan(
            program,
            evaluation,
            tuple((each, result.step_s) for each, result, _ in ranked),
            least_s or bound_s(program.shares),
            self.expansions,
        )


@dataclass(frozen=True, slots=True)
class BaselinePlan:
    """A published way of training as a program.

    Attributes:
        name: as tables have it.
        program: of the same theory.
        evaluation: what it takes.
    """

    name: str
    program: SpmdProgram
    evaluation: ProgramEvaluation


def plan_baseline(graph: SpmdGraph, machine: Machine, name: str) -> BaselinePlan:
    """A baseline's program.

    Args:
        graph: the model.
        machine: the devices.
        name: one of :data:`BASELINES`.

    Raises:
        ValueError: there is no such baseline.
    """
    if name not in BASELINES:
        raise ValueError(f"unknown baseline {name!r}; known ones: {', '.join(BASELINES)}")
    theory = Theory(graph, machine.num_devices)
    limits, is_even = BASELINES[name]
    even = (1 / machine.num_devices,) * machine.num_devices
    shares = (even if is_even else machine.speeds.shares,)
    options = SearchOptions(allowed=limits(graph, theory), name=name)
    found: FoundProgram = find_program(graph, machine, shares, options, theory)
    return BaselinePlan(name, found.program, evaluate_program(found.program, graph, machine))


BASELINES: dict[str, tuple[Callable[[SpmdGraph, Theory], Allowed], bool]] = {
    "DP-EV": (DataParallel, True),
    "DP-CP": (DataParallel, False),
    "ZeRO": (ShardedDataParallel, True),
}
"""Name -> what it is limited to, and whether shares are even (else by speed)."""
