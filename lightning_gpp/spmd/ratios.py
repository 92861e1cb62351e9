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
from collections.abc import Iterable, Mapping

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from lightning_gpp.spmd.costs.prices import Machine, PriceList
from lightning_gpp.spmd.costs.share_cost import ShareCost, Vector
from lightning_gpp.spmd.costs.simulate import halves_in_order, updates
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.placement import Placement
from lightning_gpp.spmd.program import Computation, Conversion, Instruction, SpmdProgram

Line = tuple[tuple[float, ...], tuple[float, ...]]
"""Constants and slopes of all kinds of devices."""

Stretch = frozenset[tuple[tuple[Line, ...], int]]
"""Costs one after the other, each the largest of its lines, and how many there are of each."""


class _LinearProgram:
    """Rows ``sum of entries <= limit`` over the shares of all kinds, then further columns.

    Args:
        num_alike: devices of every kind.
    """

    def __init__(self, num_alike: tuple[int, ...]) -> None:
        self.num_alike = num_alike
        self._entries: list[tuple[int, int, float]] = []
        self._limits: list[float] = []
        self._weights: list[float] = [0.0] * len(num_alike)
        self._largest: dict[tuple[tuple[Line, ...], int], int] = {}

    def add_row(self, entries: Iterable[tuple[int, float]], limit: float) -> None:
        """A row of (column, factor)."""
        row = len(self._limits)
        self._entries += [(row, column, factor) for column, factor in entries if factor]
        self._limits.append(limit)

    def _column(self, weight: float) -> int:
        """Another column, of which so much is in what is made least."""
        self._weights.append(weight)
        return len(self._weights) - 1

    def add_stretch(self, stretch: Stretch, count: int) -> None:
        """What takes as long as its slowest kind of device, so many times."""
        own = self._column(count)
        for kind in range(len(self.num_alike)):
            entries: defaultdict[int, float] = defaultdict(float, {own: -1.0})
            constant = 0.0
            for lines, times in stretch:
                if len(lines) > 1:
                    entries[self._largest_of(lines, kind)] += times
                    continue
                ((constants, slopes),) = lines
                constant += times * constants[kind]
                entries[kind] += times * slopes[kind]
            self.add_row(entries.items(), -constant)

    def _largest_of(self, lines: tuple[Line, ...], kind: int) -> int:
        """The column of what a cost of several lines takes on a kind of device."""
        if (lines, kind) not in self._largest:
            own = self._largest[lines, kind] = self._column(0.0)
            for constants, slopes in lines:
                entries = [(kind, slopes[kind]), (own, -1.0)]
                self.add_row(entries, -constants[kind])
        return self._largest[lines, kind]

    def solve(self, least: float) -> Vector | None:
        """The share of a device of every kind, each at least ``least``; None if none fit.

        Raises:
            RuntimeError: the solver gave up for another reason.
        """
        num_kinds, width = len(self.num_alike), len(self._weights)
        rows, columns, factors = zip(*self._entries)
        found = linprog(
            self._weights,
            A_ub=coo_array((factors, (rows, columns)), shape=(len(self._limits), width)).tocsr(),
            b_ub=self._limits,
            A_eq=[[*self.num_alike, *[0] * (width - num_kinds)]],
            b_eq=[1.0],
            bounds=[(least, 1.0)] * num_kinds + [(0.0, None)] * (width - num_kinds),
            method="highs",
        )
        if found.status == INFEASIBLE:
            return None
        if not found.success:
            raise RuntimeError(f"the shares' linear program was not solved: {found.message}")
        shares: Vector = np.clip(found.x[:num_kinds], 0.0, 1.0)
        return shares


INFEASIBLE = 2
"""SciPy's status."""


def best_shares(program: SpmdProgram, graph: SpmdGraph, machine: Machine) -> tuple[float, ...]:
    """The shares with which a program takes least, as if units were as small as one likes.

    Every device keeps at least a unit of whatever the program deals.

    Args:
        program: whose shares are to be changed.
        graph: the model.
        machine: the devices.

    Returns:
        The program's own shares where it deals nothing, or where none fit the memory.

    Raises:
        RuntimeError: the solver gave up.
    """
    prices = PriceList(graph, machine, program.shares)
    units = {placement.units for placement in program.placements if placement.units is not None}
    firsts = [devices[0] for devices in machine.alike]
    stretches = _stretches(program, prices, firsts)
    if not units or not stretches:
        return program.shares
    linear = _LinearProgram(tuple(map(len, machine.alike)))
    for stretch, count in stretches.items():
        linear.add_stretch(stretch, count)
    _add_memory(linear, program, prices, firsts)
    found = linear.solve(1 / min(units))
    if found is None:
        return program.shares
    shares = np.empty(machine.num_devices)
    for kind, devices in enumerate(machine.alike):
        shares[list(devices)] = found[kind]
    return tuple((shares / shares.sum()).tolist())


def _stretches(program: SpmdProgram, prices: PriceList, firsts: list[int]) -> Mapping[Stretch, int]:
    """What some devices do between collectives, and these, as far as shares can change it."""
    found: Counter[Stretch] = Counter()
    now: Counter[tuple[Line, ...]] = Counter()

    def end() -> None:
        if any(any(slopes) for lines in now for _, slopes in lines):
            found[frozenset(now.items())] += 1
        now.clear()

    has_sums = False
    for half, waiting_bytes in halves_in_order(program, prices):
        has_sums = has_sums or waiting_bytes > 0
        if half.move_s and not waiting_bytes:
            end()
            for cost in half.moved:
                now[_lines(cost, firsts)] += 1
                end()
        now.update(_lines(cost, firsts) for cost in half.computed)
    if has_sums:  # whose last one all wait for before they step the optimizer
        end()
    now.update(_lines(cost, firsts) for half in updates(program, prices) for cost in half.computed)
    end()
    return found


def _lines(cost: ShareCost, devices: list[int]) -> tuple[Line, ...]:
    """The lines of a cost on some devices."""
    return tuple(
        (tuple(each.constant_s[devices].tolist()), tuple(each.slope_s[devices].tolist()))
        for each in cost
    )


def _add_memory(
    linear: _LinearProgram, program: SpmdProgram, prices: PriceList, firsts: list[int]
) -> None:
    """Rows for what some devices hold."""
    machine, value_of = prices.machine, prices.graph.value_of
    held: list[tuple[Placement | None, Vector]] = [
        (p, prices.stored(value_of[n], p).memory_bytes) for n, p in program.storage.items()
    ]
    held += [(_placement(each), prices.of(each).memory_bytes) for each in program.instructions]
    constant, slope = np.zeros(machine.num_devices), np.zeros(machine.num_devices)
    for placement, memory_bytes in held:
        if placement is not None and placement.is_shard:
            slope = slope + memory_bytes / prices.parts.of_placement(placement)
        else:
            constant = constant + memory_bytes
    for kind, device in enumerate(firsts):
        limit = machine.memory_bytes[device]
        if np.isfinite(limit):
            linear.add_row([(kind, float(slope[device]))], float(limit - constant[device]))


def _placement(instruction: Instruction) -> Placement | None:
    """Of what an instruction leaves in memory."""
    if isinstance(instruction, Computation):
        return instruction.outputs[0] if instruction.outputs else None
    return instruction.target if isinstance(instruction, Conversion) else None
