"""Every device's share: the linear program of HAP (equation 3) with its constants.

Between two collectives devices compute on their own, each instruction ``constant + slope * share``
or, where several lines bound it, the largest of these. Such a *stretch* ``k`` takes ``X_k``, as
long as its slowest device, and so does a collective. The shares that make the sum least are those
of::

    minimise    sum_k X_k
    subject to  sum_i t_id <= X_k                    all instructions i of a stretch, kinds d
                constant_id + slope_id * r_d <= t_id    for every line
                bytes_d(r_d) <= memory_d                where there is a limit
                sum_d n_d * r_d = 1,  r_d >= one unit

Sums of gradients, which go on beside the backward, end no stretch but the last one. Devices that
are alike get alike (the mean of a solution over them is one, too), so the columns are the kinds
``d`` of devices with their numbers ``n_d``.

The release leaves the constants out, which moves the minimum where an instruction has both (a
launch, a replicated part). Equal stretches are one row with their number as weight, so a model of
many equal layers is no larger a program than one of few.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from lightning_gpp.spmd.costs.judge import halves_in_order, updates
from lightning_gpp.spmd.costs.machine import Machine, ShareCost, Vector
from lightning_gpp.spmd.costs.prices import PriceList
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.placement import Placement
from lightning_gpp.spmd.program import Computation, Conversion, SpmdProgram

Line = tuple[tuple[float, ...], tuple[float, ...]]
"""Constants and slopes of all kinds of devices."""

Cost = tuple[Line, ...]
"""The largest of its lines."""

Row = tuple[Mapping[int, float], float]
"""Factors by column, whose sum is at most a limit."""

INFEASIBLE = 2
"""SciPy's status."""


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
    prices = PriceList(graph, machine, program.shares)
    units = {placement.units for placement in program.placements if placement.units is not None}
    firsts, num_kinds = [devices[0] for devices in machine.alike], len(machine.alike)
    stretches = _stretches(program, prices, firsts)
    if not units or not stretches:
        return program.shares
    rows, weights = _rows(stretches, num_kinds)
    rows += _memory_rows(program, prices, firsts)
    entries = [(at, c, f) for at, (row, _) in enumerate(rows) for c, f in row.items() if f]
    places, columns, factors = zip(*entries)
    others = len(weights) - num_kinds
    found = linprog(
        weights,
        A_ub=coo_array((factors, (places, columns)), shape=(len(rows), len(weights))).tocsr(),
        b_ub=[limit for _, limit in rows],
        A_eq=[[*map(len, machine.alike), *[0] * others]],
        b_eq=[1.0],
        bounds=[(1 / min(units), 1.0)] * num_kinds + [(0.0, None)] * others,
        method="highs",
    )
    if found.status == INFEASIBLE:
        return program.shares
    if not found.success:
        raise RuntimeError(f"the shares' linear program was not solved: {found.message}")
    shares = np.empty(machine.num_devices)
    for kind, devices in enumerate(machine.alike):
        shares[list(devices)] = np.clip(found.x[kind], 0.0, 1.0)
    return tuple((shares / shares.sum()).tolist())


def _stretches(
    program: SpmdProgram, prices: PriceList, firsts: list[int]
) -> Counter[frozenset[tuple[Cost, int]]]:
    """What some devices do between collectives, and these, as far as shares can change it.

    Each is costs one after the other, with how many there are of each; equal ones are counted.
    """
    found: Counter[frozenset[tuple[Cost, int]]] = Counter()
    now: Counter[Cost] = Counter()

    def end() -> None:
        if any(any(slopes) for lines in now for _, slopes in lines):
            found[frozenset(now.items())] += 1
        now.clear()

    def take(cost: ShareCost) -> None:
        columns = ((line.constant_s[firsts], line.slope_s[firsts]) for line in cost)
        now[tuple((tuple(one.tolist()), tuple(other.tolist())) for one, other in columns)] += 1

    has_sums = False
    for half, waiting_bytes in halves_in_order(program, prices):
        has_sums = has_sums or waiting_bytes > 0
        if half.move_s and not waiting_bytes:
            end()
            for cost in half.moved:
                take(cost)
                end()
        for cost in half.computed:
            take(cost)
    if has_sums:  # whose last one all wait for before they step the optimizer
        end()
    for half in updates(program, prices):
        for cost in half.computed:
            take(cost)
    end()
    return found


def _rows(
    stretches: Counter[frozenset[tuple[Cost, int]]], num_kinds: int
) -> tuple[list[Row], list[float]]:
    """What takes as long as its slowest kind of device; and what every column costs."""
    rows: list[Row] = []
    weights = [0.0] * num_kinds
    largest: dict[tuple[Cost, int], int] = {}

    def column_of(cost: Cost, kind: int) -> int:
        """The column of what a cost of several lines takes on a kind of device."""
        if (cost, kind) not in largest:
            own = largest[cost, kind] = len(weights)
            weights.append(0.0)
            rows.extend(
                ({kind: slopes[kind], own: -1.0}, -constants[kind]) for constants, slopes in cost
            )
        return largest[cost, kind]

    for stretch, count in stretches.items():
        own = len(weights)
        weights.append(count)
        for kind in range(num_kinds):
            entries, constant = defaultdict(float, {own: -1.0}), 0.0
            for cost, times in stretch:
                if len(cost) > 1:
                    entries[column_of(cost, kind)] += times
                    continue
                ((constants, slopes),) = cost
                constant += times * constants[kind]
                entries[kind] += times * slopes[kind]
            rows.append((entries, -constant))
    return rows, weights


def _memory_rows(program: SpmdProgram, prices: PriceList, firsts: list[int]) -> Iterator[Row]:
    """What some devices hold."""
    machine, value_of = prices.machine, prices.graph.value_of
    held: list[tuple[Placement | None, Vector]] = [
        (p, prices.stored(value_of[n], p).memory_bytes) for n, p in program.storage.items()
    ]
    for each in program.instructions:
        place = each.target if isinstance(each, Conversion) else None
        if isinstance(each, Computation) and each.outputs:
            place = each.outputs[0]
        held.append((place, prices.of(each).memory_bytes))
    constant, slope = np.zeros(machine.num_devices), np.zeros(machine.num_devices)
    for placement, memory_bytes in held:
        if placement is not None and placement.is_shard:
            slope = slope + memory_bytes / prices.parts.of_placement(placement)
        else:
            constant = constant + memory_bytes
    for kind, device in enumerate(firsts):
        if np.isfinite(limit := machine.memory_bytes[device]):
            yield {kind: float(slope[device])}, float(limit - constant[device])
