"""The program of a model on devices of unequal speed: search and shares in turn.

The cheapest program depends on the shares and the best shares on the program. HAP takes turns until
nothing improves; here the best *pair* is kept (the release keeps a program with the shares of the
next, rejected one), and the turns begin from shares in proportion to the speeds, and from even
ones. The search goes by prices, which add up; of the pairs that were met the one is best whose
simulated step is shortest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_gpp.common.without_collection import without_collection
from lightning_gpp.spmd.costs.judge import evaluate_program
from lightning_gpp.spmd.costs.machine import Machine
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.placement import units_per_device
from lightning_gpp.spmd.ratios import best_shares
from lightning_gpp.spmd.rules.theory import Theory
from lightning_gpp.spmd.search.find import NoProgramFitsError, SpmdPlan, find_program
from lightning_gpp.spmd.search.limits import Allowed, DataParallel, ShardedDataParallel

MOST_TURNS = 8
"""Turns of search and shares; the published models need two or three."""

Shares = tuple[float, ...]


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
    tried: list[SpmdPlan] = []
    met: set[tuple[tuple[int, ...], ...]] = set()
    refused: list[NoProgramFitsError] = []

    def add(plan: SpmdPlan) -> Shares:
        """With its own shares and the best; the next may do without what those are for."""
        shares = best_shares(plan.program, graph, machine)
        other = replace(plan.program, shares=shares)
        evaluation = evaluate_program(other, graph, machine)
        pairs = plan, SpmdPlan(other, evaluation, None)
        tried.extend(pair for pair in pairs if pair.evaluation.fits(machine))
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
            shares = add(found)

    take_turns(machine.speeds.shares)
    take_turns((1 / machine.num_devices,) * machine.num_devices)
    if not tried:
        raise refused[0]
    # Prices know nothing of sums of gradients beside the backward, which these have most of.
    for name in BASELINES:
        add(replace(plan_baseline(graph, machine, name, theory), least_s=None))
    # Of equal ones those that were searched with their shares.
    return min(tried, key=lambda each: (each.evaluation.step_s, each.least_s is None))


def plan_baseline(
    graph: SpmdGraph, machine: Machine, name: str, theory: Theory | None = None
) -> SpmdPlan:
    """A published way of training, as a program of the same theory.

    Args:
        graph: the model.
        machine: the devices.
        name: one of :data:`BASELINES`.
        theory: of the graph, where it has been made before.
    """
    theory = theory or Theory(graph, machine.num_devices)
    limits, is_even = BASELINES[name]
    even = (1 / machine.num_devices,) * machine.num_devices
    shares = even if is_even else machine.speeds.shares
    allowed = limits(graph, theory)
    return find_program(graph, machine, shares, theory, allowed=allowed, name=name)


BASELINES: dict[str, tuple[Callable[[SpmdGraph, Theory], Allowed], bool]] = {
    "DP-EV": (DataParallel, True),
    "DP-CP": (DataParallel, False),
    "ZeRO": (ShardedDataParallel, True),
}
"""Name -> what it is limited to, and whether shares are even (else by speed)."""
