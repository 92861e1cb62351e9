"""Every device's share: the linear program of HAP (equation 3) with its constants.

Between two collectives devices compute on their own. Such a *stretch* ``k`` takes ``X_k``, as long
as its slowest device, and so does a collective. What a device takes grows with its own share alone,
and is convex (the largest of lines). The shares that make the sum least are those of::

    minimise    sum_k X_k
    subject to  t_kd(s_d) + t'_kd(s_d) * (r_d - s_d) <= X_k      stretches k, kinds d, points s
                bytes_d(r_d) <= memory_d                         where there is a limit
                sum_d n_d * r_d = 1,  r_d >= one unit

The tangents are those at the shares ``s`` that were met so far, at first the program's own; there
are enough when a step takes as long as they say (Kelley, "The cutting-plane method for solving
convex programs", 1960), mostly after two or three. Sums of gradients, which go on beside the
backward, end no stretch but the last one. Devices that are alike get alike, so the columns are the
kinds ``d`` of devices with their numbers ``n_d``.

The release leaves the constants out, which moves the minimum where an instruction has both (a
launch, a replicated part).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array

from lightning_gpp.spmd.costs.judge import PricedProgram
from lightning_gpp.spmd.costs.machine import Machine, Vector
from lightning_gpp.spmd.costs.prices import PriceList
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.program import SpmdProgram

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
