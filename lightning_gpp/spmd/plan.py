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
from lightning_gpp.spmd.search.find import FoundProgram, SearchOptions, find_program
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
        expansions: labels that were continued in all searches.
    """

    program: SpmdProgram
    evaluation: ProgramEvaluation
    tried: tuple[tuple[SpmdProgram, float], ...]
    expansions: int


def plan_hap(graph: SpmdGraph, machine: Machine, *, allowed: Allowed | None = None) -> SpmdPlan:
    """The best pair of program and shares that is found.

    Where the best program without regard to memory does not fit, the search counts memory, too.

    Args:
        graph: the model.
        machine: the devices.
        allowed: what the search is limited to.

    Raises:
        NoProgramFitsError: no program fits the memory of all devices.
        TooManyExpansionsError: the search with limits of memory was too large.
    """
    theory = Theory(graph, machine.num_devices)
    options = SearchOptions(allowed=allowed or Allowed())
    plan = _take_turns(graph, machine, theory, options)
    if plan.evaluation.fits(machine):
        return plan
    return _take_turns(graph, machine, theory, replace(options, limits_memory=True))


def _take_turns(
    graph: SpmdGraph, machine: Machine, theory: Theory, options: SearchOptions
) -> SpmdPlan:
    count = machine.num_devices
    tried: dict[Shares, tuple[SpmdProgram, float]] = {}
    expansions = 0
    for start in dict.fromkeys((machine.speeds.shares, (1 / count,) * count)):
        shares: Shares = (start,)
        for _ in range(MOST_TURNS):
            if shares in tried:
                break
            found = find_program(graph, machine, shares, options, theory)
            expansions += found.effort.expansions
            tried[shares] = (found.program, found.seconds)
            better = best_shares(found.program, graph, machine)
            again = replace(found.program, shares=better)
            fitted = evaluate_program(again, graph, machine)
            if better not in tried and fitted.step_s >= found.seconds:
                tried[better] = (again, fitted.step_s)
                break
            shares = better
    ranked = sorted(tried.values(), key=lambda each: each[1])
    fitting = [
        each
        for each in ranked
        if not options.limits_memory or evaluate_program(each[0], graph, machine).fits(machine)
    ]
    program = (fitting or ranked)[0][0]
    return SpmdPlan(program, evaluate_program(program, graph, machine), tuple(ranked), expansions)


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
