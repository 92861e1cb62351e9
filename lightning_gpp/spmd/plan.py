"""The program of a model on devices of unequal speed: search and shares in turn.

The cheapest program depends on the shares and the best shares on the program. HAP takes turns until
nothing improves; here the best *pair* is kept (the release keeps a program with the shares of the
next, rejected one), and the turns begin from shares in proportion to the speeds, and from even
ones. The search goes by prices, which add up; of the pairs that were met the one is best whose
simulated step is shortest.

Every device's share follows from the linear program of HAP (equation 3) with its constants. Between
two collectives devices compute on their own. Such a *stretch* ``k`` takes ``X_k``, as long as its
slowest device, and so does a collective. What a device takes grows with its own share alone, and is
convex (the largest of lines). The shares that make the sum least are those of::

    minimise    sum_k X_k
    subject to  t_kd(s_d) + t'_kd(s_d) * (r_d - s_d) <= X_k      stretches k, kinds d, points s
                bytes_d(r_d) <= memory_d                         where there is a limit
                sum_d n_d * r_d = 1,  r_d >= one unit

The tangents are those at the shares ``s`` that were met so far, at first the program's own; there
are enough when a step takes as long as they say (Kelley, "The cutting-plane method for solving
convex programs", 1960), mostly after two or three. Sums of gradients, which go on beside the
backward, end no stretch but the last one. Devices that are alike get alike, so the columns are the
kinds ``d`` of devices with their numbers ``n_d``. The release leaves the constants out, which moves
the minimum where an instruction has both (a launch, a replicated part).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array

from lightning_gpp.common.without_collection import without_collection
from lightning_gpp.spmd.costs.machine import Machine, Vector
from lightning_gpp.spmd.costs.prices import PricedProgram, PriceList, evaluate_program
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.placement import units_per_device
from lightning_gpp.spmd.program import SpmdProgram
from lightning_gpp.spmd.rules.theory import Theory
from lightning_gpp.spmd.search.choices import Allowed, DataParallel, ShardedDataParallel
from lightning_gpp.spmd.search.find import NoProgramFitsError, SpmdPlan, find_program

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


MOST_POINTS = 30
"""Shares at which tangents are taken."""

INFEASIBLE = 2
"""SciPy's status."""

_STEP, _SAME = 1e-6, 1e-6
"""A difference of shares that tells slopes; and what steps may differ by, relative: as the solver
keeps to its constraints."""


def best_shares(program: SpmdProgram, graph: SpmdGraph, machine: Machine) -> tuple[float, ...]:
    """The shares with which a program takes least, as if units were as small as one likes.

    Every device keeps at least a unit of whatever the program divides.

    Args:
        program: whose shares are to be changed.
        graph: the model.
        machine: the devices.

    Returns:
        The program's own shares where it divides nothing, or where none fit the memory.

    Raises:
        RuntimeError: the solver gave up.
    """
    units = {placement.units for placement in program.placements if placement.units is not None}
    firsts, shares = [devices[0] for devices in machine.alike], np.array(program.shares)
    tangents: list[NDArray[np.float64]] = []
    scale_s, least = 1.0, 0.0
    while units and len(tangents) < MOST_POINTS:
        now = _each_takes(program, graph, machine, shares)
        step_s = now[:-1].max(1).sum()
        if tangents and step_s <= least * scale_s * (1 + _SAME):
            break
        scale_s = scale_s if tangents else step_s  # the solver's numbers are to be about 1
        slopes = (_each_takes(program, graph, machine, shares + _STEP) - now) / _STEP
        lines = np.stack([now - slopes * shares, slopes], 1)[..., firsts]
        if not slopes[:-1].any():
            return program.shares
        tangents.append(lines[:-1] / scale_s)
        constant_bytes, slope_bytes = lines[-1]
        most = np.ones(len(firsts))
        limits = machine.memory_bytes[firsts]
        np.divide(limits - constant_bytes, slope_bytes, out=most, where=slope_bytes > 0)
        bounds = np.stack([np.full(len(firsts), 1 / min(units)), np.minimum(most, 1.0)], 1)
        found = _solved(np.stack(tangents, 1), [*map(len, machine.alike)], bounds)
        if found is None:
            return program.shares
        of_kinds, least = found
        for share, devices in zip(of_kinds, machine.alike, strict=True):
            shares[list(devices)] = share
    return tuple((shares / shares.sum()).tolist())


def _solved(
    tangents: NDArray[np.float64], counts: list[int], bounds: NDArray[np.float64]
) -> tuple[Vector, float] | None:
    """The share of every kind of device, and what a step takes; None if none fit.

    Shapes:
        - tangents: (stretches, points, 2, kinds), constants and slopes
        - bounds: (kinds, 2)
    """
    lines, times = np.unique(tangents, axis=0, return_counts=True)  # of equal layers one
    constants, slopes = lines[:, :, 0], lines[:, :, 1]
    stretch, _, kind = np.indices(constants.shape).reshape(3, -1)
    row, num_kinds, num = np.arange(constants.size), len(counts), len(lines)
    factors = np.concatenate([slopes.ravel(), np.full(constants.size, -1.0)])
    places = np.tile(row, 2), np.concatenate([kind, num_kinds + stretch])
    found = linprog(
        [*[0.0] * num_kinds, *times],
        A_ub=coo_array((factors, places)).tocsr(),
        b_ub=-constants.ravel(),
        A_eq=[[*counts, *[0] * num]],
        b_eq=[1.0],
        bounds=[*bounds.tolist(), *[(0.0, None)] * num],
        method="highs",
    )
    if found.status == INFEASIBLE:
        return None
    if not found.success:
        raise RuntimeError(f"the shares' linear program was not solved: {found.message}")
    return found.x[:num_kinds], float(found.fun)


def _each_takes(
    program: SpmdProgram, graph: SpmdGraph, machine: Machine, shares: Vector
) -> NDArray[np.float64]:
    """Seconds of every stretch, and at last the bytes held, on every device with its share.

    Shapes:
        - returned: (stretches + 1, devices)
    """
    priced = PricedProgram(program, PriceList(graph, machine, shares.tolist(), in_units=False))
    none, found, has_sums = np.zeros(machine.num_devices), list[Vector](), False
    now = none
    for half, waiting_bytes in priced.halves_in_order():
        has_sums = has_sums or waiting_bytes > 0
        if half.move_s and not waiting_bytes:
            found, now = [*found, now, half.moved_s], none
        now = now + half.compute_s
    if has_sums:  # whose last one all wait for before they step the optimizer
        found, now = [*found, now], none
    now = sum((half.compute_s for half in priced.updates), now)
    return np.array([*found, now, sum(price.memory_bytes for price in priced.everything)])
