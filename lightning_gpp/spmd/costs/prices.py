"""Prices of instructions, and predictions of whole programs.

Computing goes by the roofline, as in :mod:`lightning_gpp.cost.roofline`, over the part that a
device has: its floating-point operations at its sustained speed or its bytes at its memory
bandwidth, whichever takes longer, and a launch. A backward is a pass per gradient for a product,
one pass for anything else. Moving goes by the table of
:class:`~lightning_gpp.spmd.program.Move`.

Memory is that at the end of a forward: parameters, optimizer state, and what operators and
conversions make of tensors with a gradient, views excepted. So it is an upper bound, but for what
an operator needs for itself.

Prices add up: every instruction takes as long as its slowest device. A step is simulated
(:func:`evaluate_program`): each device goes on when it is done, collectives begin when the last
device has come, one after the other, and sums of gradients go on in buckets beside the rest of the
backward, as :mod:`lightning_gpp.spmd.run` does it; then each steps the optimizer. So a step takes
its price or less, but for the latency of a last bucket that is not full.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_gpp.cluster import BUCKET_BYTES
from lightning_gpp.spmd.costs.machine import AlphaBeta, CollectiveTimes, Machine, Vector
from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator, SpmdValue
from lightning_gpp.spmd.placement import R_SAME, Placement, PlacementKind, units_per_device
from lightning_gpp.spmd.program import (
    Computation,
    Instruction,
    Move,
    SpmdProgram,
    bytes_in_bucket,
    is_summed_later,
)
from lightning_gpp.spmd.rules.theory import Rule

_R, _SAME = PlacementKind.REPLICATE_SUMMED, PlacementKind.REPLICATE
_S, _P = PlacementKind.SHARD, PlacementKind.PARTIAL

FORWARD = {
    (_S, _R): "all-gather",
    (_S, _SAME): "all-gather",
    (_P, _S): "reduce-scatter",
    (_P, _R): "all-reduce",
    (_P, _SAME): "all-reduce",
    (_S, _S): "all-to-all",
    (None, _S): "root",
    (_S, None): "root",
    (None, _R): "broadcast",
    (None, _SAME): "broadcast",
    (_P, None): "reduce",
}
"""Collective of a move forwards, rank 0 being None; nothing for the other pairs. Backwards, a move
is that of the gradients, from the target's dual to the source's (:attr:`Placement.dual`)."""


def collective(source: Placement | None, target: Placement | None) -> str | None:
    """The collective of a move; None where nothing is sent."""
    one, other = (None if end is None else end.kind for end in (source, target))
    return None if source == target else FORWARD.get((one, other))


FREE_KINDS = frozenset(
    (
        *("view", "unflatten", "unsqueeze", "squeeze", "transpose", "t", "permute", "select"),
        *("slice", "narrow", "expand", "alias", "detach", "split", "split_with_sizes", "chunk"),
        *("unbind", "swapaxes", "flatten", "lift_fresh"),
    )
)
"""Operators that move nothing: their outputs are the memory of their inputs."""


@dataclass(frozen=True, slots=True, eq=False)
class Half:
    """The forward or the backward of an instruction: a collective of all devices, then computing.

    Attributes:
        moved_s: seconds of the collective as every device's part makes it; it takes the most.
        move_s: seconds of the collective; zero where there is none.
        compute_s: seconds of every device, shape ``(num_devices,)``.
    """

    moved_s: Vector
    move_s: float
    compute_s: Vector


@dataclass(frozen=True, slots=True, eq=False)
class Price:
    """Seconds and bytes of something, with given shares.

    Attributes:
        seconds: forwards and backwards, each on its slowest device.
        memory_bytes: that stay on every device, shape ``(num_devices,)``.
        halves: its forward and its backward.
    """

    seconds: float
    memory_bytes: Vector
    halves: tuple[Half, Half]

    def held_bytes(self, devices: Sequence[int]) -> float:
        """Bytes that stay on some devices together."""
        return float(self.memory_bytes[devices].sum())


class PriceList:
    """Prices of a graph's instructions, worked out once for all that are alike (equal layers).

    Args:
        graph: the model.
        machine: the devices.
        shares: of the devices.
        in_units: whether devices get whole units, close to their shares; else as if units were as
            small as one likes.
    """

    def __init__(
        self,
        graph: SpmdGraph,
        machine: Machine,
        shares: Sequence[float],
        *,
        in_units: bool = True,
    ) -> None:
        self.graph, self.machine, self.shares = graph, machine, tuple(shares)
        self._none, self._in_units = np.zeros(machine.num_devices), in_units
        self._parts: dict[int, Vector] = {0: self._none + 1}
        self._known: dict[Hashable, Price] = {}

    def _part(self, placement: Placement) -> Vector:
        """The part of a tensor's bytes that each device has, shape ``(num_devices,)``."""
        units = placement.units or 0
        if units not in self._parts:
            counts = units_per_device(units, self.shares) if self._in_units else ()
            self._parts[units] = np.array(counts) / units if counts else np.array(self.shares)
        return self._parts[units]

    def of(self, instruction: Instruction) -> Price:
        """An instruction of a program."""
        if isinstance(instruction, Computation):
            operator = self.graph.operator_of[instruction.operator]
            return self.computation(operator, instruction)
        value = self.graph.value_of[instruction.value]
        return self.move(value, instruction.source, instruction.target)

    def stored(self, value: SpmdValue, placement: Placement) -> Price:
        """A parameter or buffer kept in a placement; backwards the optimizer's step follows."""
        update_s, tensors = self._none, 1
        held_bytes = value.size_bytes * self._part(placement)
        if self._flows(value):
            update_s = held_bytes * self.machine.speeds.update_s_per_byte
            tensors += self.machine.optimizer_tensors
        return self._price(tensors * held_bytes, computed=(self._none, update_s))

    def computation(self, operator: SpmdOperator, placed: Rule | Computation) -> Price:
        """An operator on parts."""
        values = [self.graph.value_of[name] for name in (*operator.inputs, *operator.outputs)]
        alike = (
            *(operator.kind, operator.flops, placed.inputs, placed.outputs, placed.option),
            *((value.size_bytes, value.requires_grad) for value in values),
        )
        if alike not in self._known:
            memory = self._none
            if operator.kind not in FREE_KINDS:
                for name, place in zip(operator.outputs, placed.outputs):
                    memory = memory + self._kept(self.graph.value_of[name], place)
            self._known[alike] = self._price(memory, computed=self._computed(operator, placed))
        return self._known[alike]

    def _computed(
        self, operator: SpmdOperator, placed: Rule | Computation
    ) -> tuple[Vector, Vector]:
        """Seconds of every device, forwards and backwards."""
        value_of, speeds = self.graph.value_of, self.machine.speeds
        if operator.kind in FREE_KINDS:
            return self._none, self._none
        operands = operator.operands(placed.inputs, placed.outputs)
        moved_bytes = sum(value_of[name].size_bytes * self._part(p) for name, p in operands)
        divided = next((place for _, place in operands if place.is_shard), R_SAME)
        compute_s = operator.flops * self._part(divided) / speeds.flops_per_s
        pass_s = speeds.launch_s + np.maximum(compute_s, moved_bytes / speeds.memory_bytes_per_s)
        num_passes = 0
        if any(self._flows(value_of[name]) for name in operator.outputs):
            wanted = sum(value_of[name].requires_grad for name in operator.inputs)
            num_passes = min(wanted, 2) if operator.flops else 1
        return pass_s, num_passes * pass_s

    def move(self, value: SpmdValue, source: Placement | None, target: Placement | None) -> Price:
        """A value in another placement, forwards and backwards."""
        alike = (value.size_bytes, value.requires_grad, value.source, source, target)
        if alike not in self._known:
            ends = target and target.dual, source and source.dual
            forward, backward = self._collective(value.size_bytes, source, target), self._none
            if self._flows(value):
                backward = self._collective(value.size_bytes, *ends)
                if is_summed_later(value, source, target) and self.machine.num_devices > 1:
                    line = self.machine.times.all_reduce
                    backward = self._none + line.in_bucket_s(value.size_bytes, BUCKET_BYTES)
            memory = self._none
            if source and target:
                kinds = source.kind, target.kind
                is_new = kinds in FORWARD or kinds == (_S, _P)
                memory = self._kept(value, target) if is_new else memory
            self._known[alike] = self._price(memory, (forward, backward))
        return self._known[alike]

    def _collective(
        self, size_bytes: float, source: Placement | None, target: Placement | None
    ) -> Vector:
        """Seconds of a move; shards are padded, so that all take as long as the largest."""
        name, times = collective(source, target), self.machine.times
        if name is None or self.machine.num_devices == 1:
            return self._none
        if name == "all-reduce":
            return self._none + times.all_reduce_s(size_bytes)
        line: AlphaBeta = getattr(times, name.replace("-", "_"))
        if source is None or target is None:
            return self._none + line.seconds(size_bytes)
        parts = [self._part(place) for place in (source, target) if place.is_shard]
        padded_bytes = size_bytes * self.machine.num_devices * np.maximum.reduce(parts)
        seconds: Vector = line.alpha_s + line.beta_s_per_byte * padded_bytes
        return seconds

    def _flows(self, value: SpmdValue) -> bool:
        """Whether there is a gradient of a value."""
        return self.machine.is_training and value.requires_grad

    def _kept(self, value: SpmdValue, placement: Placement) -> Vector:
        """Bytes of a tensor, where a backward may read it."""
        if not self._flows(value):
            return self._none
        return value.size_bytes * self._part(placement)

    def _price(
        self,
        memory_bytes: Vector,
        moved: tuple[Vector, Vector] | None = None,
        computed: tuple[Vector, Vector] | None = None,
    ) -> Price:
        """What moves and what is computed, forwards and backwards each, as a price."""
        none = self._none, self._none
        pairs = zip(moved or none, computed or none)
        one, other = (Half(move_s, float(move_s.max()), own_s) for move_s, own_s in pairs)
        seconds = sum(half.move_s + float(half.compute_s.max()) for half in (one, other))
        return Price(seconds, memory_bytes, (one, other))


@dataclass(frozen=True, slots=True, eq=False)
class ProgramEvaluation:
    """Predicted time and memory of a program.

    Attributes:
        memory_bytes: held on every device, shape ``(num_devices,)``.
        busy_s: seconds that every device computes, likewise.
        compute_s: seconds of computations, the optimizer's step among them.
        price_s: seconds of all that is to be done, each on its slowest device: what a search makes
            least.
        step_s: of a step, simulated.
    """

    memory_bytes: Vector
    busy_s: Vector
    compute_s: float
    price_s: float
    step_s: float

    @property
    def move_s(self) -> float:
        """Seconds of everything between devices."""
        return self.price_s - self.compute_s

    def fits(self, machine: Machine) -> bool:
        """Whether every device has enough memory."""
        return bool((self.memory_bytes <= machine.memory_bytes).all())


def evaluate_program(program: SpmdProgram, graph: SpmdGraph, machine: Machine) -> ProgramEvaluation:
    """Judges a program.

    Args:
        program: of the graph, for as many devices as the machine has.
        graph: the model.
        machine: the devices.
    """
    priced = PricedProgram(program, PriceList(graph, machine, program.shares))
    every, none = priced.everything, np.zeros(machine.num_devices)
    price_s = sum(price.seconds for price in every)
    return ProgramEvaluation(
        memory_bytes=sum((price.memory_bytes for price in every), none),
        busy_s=sum((half.compute_s for price in every for half in price.halves), none),
        compute_s=price_s - sum(half.move_s for price in every for half in price.halves),
        price_s=price_s,
        step_s=_step_s(priced, machine),
    )


class PricedProgram:
    """The prices of everything that a program does.

    Args:
        program: for as many devices as there are prices for.
        prices: of its graph.

    Attributes:
        everything: prices of what is stored, and of the instructions.
        updates: the optimizer's step of everything stored.
    """

    def __init__(self, program: SpmdProgram, prices: PriceList) -> None:
        value_of = prices.graph.value_of
        stored = [prices.stored(value_of[n], p) for n, p in program.storage.items()]
        self._program, self._prices = program, prices
        self._instructions = [prices.of(instruction) for instruction in program.instructions]
        self.everything = [*stored, *self._instructions]
        self.updates = [price.halves[1] for price in stored]

    def halves_in_order(self) -> Iterator[tuple[Half, int]]:
        """All that devices do in a step but the optimizer's, forwards and then backwards.

        Yields:
            It, and the bytes that wait for others to be summed with, whose sum goes on beside the
            rest.
        """
        for price in self._instructions:
            yield price.halves[0], 0
        if self._prices.machine.is_training:
            pairs = zip(self._program.instructions, self._instructions)
            for instruction, price in reversed([*pairs]):
                yield (
                    price.halves[1],
                    bytes_in_bucket(self._program, instruction, self._prices.graph),
                )


def _step_s(priced: PricedProgram, machine: Machine) -> float:
    """Seconds of a step, simulated."""
    now_s, network_s, bucket_bytes = np.zeros(machine.num_devices), 0.0, 0

    def begin(seconds: float) -> None:
        """A collective that nobody waits for yet."""
        nonlocal network_s
        network_s = max(float(now_s.max()), network_s) + seconds

    for half, waiting_bytes in priced.halves_in_order():
        bucket_bytes += waiting_bytes
        if waiting_bytes:
            if bucket_bytes >= BUCKET_BYTES:
                begin(machine.times.all_reduce_s(bucket_bytes))
                bucket_bytes = 0
            continue
        if half.move_s:
            begin(half.move_s)
            now_s[:] = network_s
        now_s += half.compute_s
    if bucket_bytes:
        begin(machine.times.all_reduce_s(bucket_bytes))
    updated_s = sum(half.compute_s for half in priced.updates)
    return float((np.maximum(now_s, network_s) + updated_s).max())


def message_bytes(program: SpmdProgram, graph: SpmdGraph, machine: Machine) -> float:
    """Bytes of all messages of a step but its inputs, padding among them, with rings and chains.

    They are what moves would take if every byte that a device sends took a second.
    """
    others = machine.num_devices - 1
    once, part = AlphaBeta(0.0, others), AlphaBeta(0.0, others / machine.num_devices)
    sent = CollectiveTimes(AlphaBeta(0.0, 2 * others), once, once, part, once, once, part)
    prices = PriceList(graph, replace(machine, times=sent), program.shares)
    return sum(
        half.move_s
        for instruction in program.instructions
        if not (isinstance(instruction, Move) and instruction.source is None)
        for half in prices.of(instruction).halves
    )
