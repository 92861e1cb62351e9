"""Every device's share: the linear program of HAP (equation 3) with its constants.

For a program, an instruction ``k`` takes ``X_k``, the largest of lines over the shares; the shares
that make the sum least are those of::

    minimise    sum_k X_k
    subject to  constant_kd + slope_kd * r_d <= X_k     for every line and kind of device
                bytes_d(r_d) <= memory_d                where there is a limit
                sum_d n_d * r_d = 1,  r_d >= one unit

Devices that are alike get alike (the mean of a solution over them is one, too), so the columns are
the kinds ``d`` of devices with their numbers ``n_d``.

The release leaves the constants out, which moves the minimum where an instruction has both (a
launch, a replicated part). Instructions with equal lines are one row with their number as weight,
so a model of many equal layers is no larger a program than one of few.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from lightning_gpp.spmd.costs.prices import Machine, PriceList
from lightning_gpp.spmd.costs.share_cost import Vector
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.placement import Placement
from lightning_gpp.spmd.program import Computation, Conversion, Instruction, SpmdProgram

Line = tuple[tuple[float, ...], tuple[float, ...], int]
"""Constants and slopes of all kinds of devices, and the segment."""


@dataclass
class _LinearProgram:
    """Rows ``sum of entries <= limit`` over the shares of all segments, then the ``X_k``."""

    num_segments: int
    num_alike: tuple[int, ...]

    def __post_init__(self) -> None:
        self._entries: list[tuple[int, int, float]] = []
        self._limits: list[float] = []
        self._weights: list[float] = []

    def add_row(self, entries: list[tuple[int, float]], limit: float) -> None:
        """A row of (column, factor)."""
        row = len(self._limits)
        self._entries += [(row, column, factor) for column, factor in entries if factor]
        self._limits.append(limit)

    def column(self, segment: int, device: int) -> int:
        """Of a share."""
        return segment * len(self.num_alike) + device

    def add_cost(self, lines: tuple[Line, ...], weight: int) -> None:
        """The largest of lines, so many times."""
        own = self.column(self.num_segments, 0) + len(self._weights)
        self._weights.append(weight)
        for constants, slopes, segment in lines:
            for device, (constant, slope) in enumerate(zip(constants, slopes)):
                self.add_row([(self.column(segment, device), slope), (own, -1.0)], -constant)

    def solve(self, least: list[float]) -> Vector | None:
        """Shares ``(num_segments, num_kinds)``, each at least its segment's; None if none fit.

        Raises:
            RuntimeError: the solver gave up for another reason.
        """
        num_shares = self.column(self.num_segments, 0)
        width = num_shares + len(self._weights)
        rows, columns, factors = zip(*self._entries)
        ones = np.zeros((self.num_segments, width))
        for segment in range(self.num_segments):
            ones[segment, self.column(segment, 0) : self.column(segment + 1, 0)] = self.num_alike
        found = linprog(
            [*[0.0] * num_shares, *self._weights],
            A_ub=coo_array((factors, (rows, columns)), shape=(len(self._limits), width)).tocsr(),
            b_ub=self._limits,
            A_eq=ones,
            b_eq=np.ones(self.num_segments),
            bounds=[
                *[(each, 1.0) for each in least for _ in self.num_alike],
                *[(0.0, None)] * len(self._weights),
            ],
            method="highs",
        )
        if found.status == INFEASIBLE:
            return None
        if not found.success:
            raise RuntimeError(f"the shares' linear program was not solved: {found.message}")
        shares: Vector = found.x[:num_shares].reshape(self.num_segments, -1)
        return np.clip(shares, 0.0, 1.0)


INFEASIBLE = 2
"""SciPy's status."""


def best_shares(
    program: SpmdProgram, graph: SpmdGraph, machine: Machine
) -> tuple[tuple[float, ...], ...]:
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
    units, prices = _least_units(program), PriceList(graph, machine, program.shares)
    firsts = [devices[0] for devices in machine.alike]
    costs = _dealt_costs(program, prices, firsts)
    if not units or not costs:
        return program.shares
    linear = _LinearProgram(len(program.shares), tuple(map(len, machine.alike)))
    for lines, count in costs.items():
        linear.add_cost(lines, count)
    _add_memory(linear, program, prices, firsts)
    least = [1 / units.get(s, machine.num_devices) for s in range(len(program.shares))]
    found = linear.solve(least)
    if found is None:
        return program.shares
    shares = np.empty((len(found), machine.num_devices))
    for kind, devices in enumerate(machine.alike):
        shares[:, devices] = found[:, [kind]]
    return tuple(tuple((row / row.sum()).tolist()) for row in shares)


def _dealt_costs(
    program: SpmdProgram, prices: PriceList, firsts: list[int]
) -> Counter[tuple[Line, ...]]:
    """The costs of some devices that shares can change, and how many there are of each."""
    found: Counter[tuple[Line, ...]] = Counter()
    for instruction in program.instructions:
        for cost in prices.of(instruction).costs:
            if any(line.slope_s.any() for line in cost.lines):
                found[
                    tuple(
                        (
                            tuple(line.constant_s[firsts].tolist()),
                            tuple(line.slope_s[firsts].tolist()),
                            line.segment,
                        )
                        for line in cost.lines
                    )
                ] += 1
    return found


def _least_units(program: SpmdProgram) -> dict[int, int]:
    """Segment -> the fewest units that it deals."""
    found: dict[int, int] = {}
    for placement in program.placements:
        if placement.units is not None:
            least = found.get(placement.segment, placement.units)
            found[placement.segment] = min(least, placement.units)
    return found


def _add_memory(
    linear: _LinearProgram, program: SpmdProgram, prices: PriceList, firsts: list[int]
) -> None:
    """Rows for what some devices hold."""
    machine, value_of = prices.machine, prices.graph.value_of
    held: list[tuple[Placement | None, Vector]] = [
        (p, prices.stored(value_of[n], p).memory_bytes) for n, p in program.storage.items()
    ]
    held += [(_placement(each), prices.of(each).memory_bytes) for each in program.instructions]
    constant = np.zeros(machine.num_devices)
    slopes = np.zeros((linear.num_segments, machine.num_devices))
    for placement, memory_bytes in held:
        if placement is not None and placement.is_shard:
            slopes[placement.segment] += memory_bytes / prices.parts.of_placement(placement)
        else:
            constant = constant + memory_bytes
    for kind, device in enumerate(firsts):
        limit = machine.memory_bytes[device]
        if np.isfinite(limit):
            entries = [
                (linear.column(segment, kind), float(row[device]))
                for segment, row in enumerate(slopes)
            ]
            linear.add_row(entries, float(limit - constant[device]))


def _placement(instruction: Instruction) -> Placement | None:
    """Of what an instruction leaves in memory."""
    if isinstance(instruction, Computation):
        return instruction.outputs[0] if instruction.outputs else None
    return instruction.target if isinstance(instruction, Conversion) else None
