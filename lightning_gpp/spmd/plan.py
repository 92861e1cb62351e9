"""The program of a model on devices of unequal speed: search and shares in turn.

The cheapest program depends on the shares and the best shares on the program. HAP takes turns until
nothing improves; here the best *pair* is kept (the release keeps a program with the shares of the
next, rejected one), and the turns begin from shares in proportion to the speeds, and from even
ones. The search goes by prices, which add up; of the pairs that were met the one is best whose
simulated step is shortest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_gpp.common.without_collection import without_collection
from lightning_gpp.spmd.costs.judge import ProgramEvaluation, evaluate_program
from lightning_gpp.spmd.costs.machine import Machine
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.placement import units_per_device
from lightning_gpp.spmd.program import SpmdProgram
from lightning_gpp.spmd.ratios import best_shares
from lightning_gpp.spmd.rules.theory import Theory
from lightning_gpp.spmd.search.find import NoProgramFitsError, find_program
from lightning_gpp.spmd.search.limits import Allowed, DataParallel, ShardedDataParallel

MOST_TURNS = 8
"""Turns of search and shares; the published models need two or three."""

Shares = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SpmdPlan:
    """A program with its prediction.

    Attributes:
        program: with its shares.
        evaluation: what it takes.
        least_s: no program has a smaller price with these shares. None where the program was found
            with other shares.
    """

    program: SpmdProgram
    evaluation: ProgramEvaluation
    least_s: float | None

    @property
    def gap(self) -> float | None:
        """At most this part of the program's price could be saved with these shares, if known."""
        if self.least_s is None or not self.evaluation.price_s:
            return None
        return max(0.0, 1 - self.least_s / self.evaluation.price_s)


@without_collection()
def plan_hap(graph: SpmdGraph, machine: Machine) -> SpmdPlan:
    """The best pair of program and shares that is found; it fits the memory of all devices.

    Args:
        graph: the model.
        machine: the devices.

    Raises:
        NoProgramFitsError: no program fits the memory of all devices.
    """
    theory = Theory(graph, machine.num_devices)
    tried: list[tuple[SpmdProgram, ProgramEvaluation, float | None]] = []
    met: set[tuple[tuple[int, ...], ...]] = set()
    refused: list[NoProgramFitsError] = []

    def add(program: SpmdProgram, least_s: float | None = None) -> None:
        evaluation = evaluate_program(program, graph, machine)
        if evaluation.fits(machine):
            tried.append((program, evaluation, least_s))

    def add_with_best_shares(program: SpmdProgram) -> Shares:
        """The next program may do without what the shares are for; this pair counts, too."""
        shares = best_shares(program, graph, machine)
        add(program)
        add(replace(program, shares=shares))
        return shares

    def take_turns(shares: Shares) -> None:
        """Search and shares in turn, until shares come to units that have been met before."""
        for _ in range(MOST_TURNS):
            divided = tuple(units_per_device(units, shares) for units in theory.units)
            if divided in met:
                return
            met.add(divided)
            try:
                found = find_program(graph, machine, shares, theory, limits_memory=True)
            except NoProgramFitsError as error:
                refused.append(error)
                return
            add(found.program, found.least_s)
            shares = add_with_best_shares(found.program)

    take_turns(machine.speeds.shares)
    take_turns((1 / machine.num_devices,) * machine.num_devices)
    if not tried:
        raise refused[0]
    # Prices know nothing of sums of gradients beside the backward, which these have most of.
    for name in BASELINES:
        add_with_best_shares(plan_baseline(graph, machine, name, theory).program)
    # Of equal ones those that were searched with their shares.
    best = min(tried, key=lambda each: (each[1].step_s, each[2] is None))
    return SpmdPlan(*best)


def plan_baseline(
    graph: SpmdGraph, machine: Machine, name: str, theory: Theory | None = None
) -> SpmdPlan:
    """A published way of training, as a program of the same theory.

    Args:
        graph: the model.
        machine: the devices.
        name: one of :data:`BASELINES`.
        theory: of the graph, where it has been made before.

    Raises:
        ValueError: there is no such baseline.
    """
    if name not in BASELINES:
        raise ValueError(f"unknown baseline {name!r}; known ones: {', '.join(BASELINES)}")
    theory = theory or Theory(graph, machine.num_devices)
    limits, is_even = BASELINES[name]
    even = (1 / machine.num_devices,) * machine.num_devices
    shares = even if is_even else machine.speeds.shares
    allowed = limits(graph, theory)
    found = find_program(graph, machine, shares, theory, allowed=allowed, name=name)
    evaluation = evaluate_program(found.program, graph, machine)
    return SpmdPlan(found.program, evaluation, found.least_s)


BASELINES: dict[str, tuple[Callable[[SpmdGraph, Theory], Allowed], bool]] = {
    "DP-EV": (DataParallel, True),
    "DP-CP": (DataParallel, False),
    "ZeRO": (ShardedDataParallel, True),
}
"""Name -> what it is limited to, and whether shares are even (else by speed)."""
