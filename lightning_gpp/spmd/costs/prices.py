"""The room's one price list: what every instruction takes, and leaves in memory.

Computing goes by the roofline, as in :mod:`lightning_gpp.cost.roofline`, over the part that a
device has: its floating-point operations at its sustained speed or its bytes at its memory
bandwidth, whichever takes longer, and a launch. A backward is a pass per gradient for a product,
one pass for anything else. Moving goes by the table of
:class:`~lightning_gpp.spmd.program.Conversion`.

Memory is that at the end of a forward: parameters, optimizer state, and what operators and
conversions make of tensors with a gradient, views excepted. So it is an upper bound, but for what
an operator needs for itself.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from lightning_gpp.cluster import BUCKET_BYTES
from lightning_gpp.spmd.costs.machine import (
    AlphaBeta,
    Machine,
    Parts,
    ShareCost,
    ShareLine,
    Vector,
)
from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator, SpmdValue
from lightning_gpp.spmd.placement import Placement, PlacementKind
from lightning_gpp.spmd.program import (
    Computation,
    Conversion,
    Instruction,
    ReceiveInput,
    is_summed_later,
)
from lightning_gpp.spmd.rules.theory import Rule

Costs = tuple[ShareCost, ...]
"""Costs one after the other."""

_NOTHING: tuple[Costs, ...] = ((),)

_R, _SAME = PlacementKind.REPLICATE_SUMMED, PlacementKind.REPLICATE
_S, _P = PlacementKind.SHARD, PlacementKind.PARTIAL

FORWARD = {
    (_S, _R): "all-gather",
    (_S, _SAME): "all-gather",
    (_P, _S): "reduce-scatter",
    (_P, _R): "all-reduce",
    (_P, _SAME): "all-reduce",
    (_S, _S): "all-to-all",
}
"""Collective of a conversion forwards; none for the other pairs. Backwards, a conversion is that of
the gradients, from the target's dual to the source's (:attr:`Placement.dual`)."""

_RECEIVED = {_S: ("root", "root"), _R: ("broadcast", "reduce"), _SAME: ("broadcast", "")}
_GIVEN = {_S: ("root", "root"), _P: ("reduce", "broadcast"), _SAME: ("", "broadcast"), _R: ("", "")}
"""What an input or output takes between rank 0 and all, and its gradient: of CollectiveTimes."""

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
        moved: the collective, as functions of the shares, one after the other.
        computed: likewise.
        move_s: seconds of the collective; zero where there is none.
        compute_s: seconds of every device, shape ``(num_devices,)``.
    """

    moved: Costs
    computed: Costs
    move_s: float
    compute_s: Vector


@dataclass(frozen=True, slots=True, eq=False)
class Price:
    """What something comes to with given shares.

    Attributes:
        seconds: forwards and backwards, each cost on its slowest device.
        memory_bytes: that stay on every device, shape ``(num_devices,)``.
        halves: its forward and its backward.
    """

    seconds: float
    memory_bytes: Vector
    halves: tuple[Half, Half]


class PriceList:
    """Prices of a graph's instructions, worked out once for all that are alike (equal layers).

    Args:
        graph: the model.
        machine: the devices.
        shares: of the devices.
    """

    def __init__(self, graph: SpmdGraph, machine: Machine, shares: tuple[float, ...]) -> None:
        self.graph, self.machine, self.parts = graph, machine, Parts(shares)
        self._none = np.zeros(machine.num_devices)
        self._known: dict[Hashable, Price] = {}

    def of(self, instruction: Instruction) -> Price:
        """An instruction of a program."""
        if isinstance(instruction, Computation):
            operator = self.graph.operator_of[instruction.operator]
            return self.computation(operator, instruction)
        value = self.graph.value_of[instruction.value]
        if isinstance(instruction, Conversion):
            return self.conversion(value, instruction.source, instruction.target)
        if isinstance(instruction, ReceiveInput):
            return self.received(value, instruction.placement)
        return self.given(value, instruction.placement)

    def stored(self, value: SpmdValue, placement: Placement) -> Price:
        """A parameter or buffer kept in a placement; backwards the optimizer's step follows."""
        seconds, flows = (
            value.size_bytes * self.machine.speeds.update_s_per_byte,
            self._flows(value),
        )
        none, units = self._none, placement.units or 0
        line = ShareLine(none, seconds, units) if units else ShareLine(seconds, none)
        update: Costs = ((line,),) if flows and seconds.any() else ()
        tensors = 1 + (self.machine.optimizer_tensors if flows else 0)
        memory = tensors * value.size_bytes * self.parts.of_placement(placement)
        return self._price(memory, computed=((), update))

    def received(self, value: SpmdValue, placement: Placement) -> Price:
        """An input of the forward."""
        return self._with_root(value, _RECEIVED[placement.kind])

    def given(self, value: SpmdValue, placement: Placement) -> Price:
        """An output of the forward."""
        return self._with_root(value, _GIVEN[placement.kind])

    def _with_root(self, value: SpmdValue, collectives: tuple[str, str]) -> Price:
        """A way between rank 0 and all, and the gradient's way back where there is one."""
        moved: list[Costs] = [(), ()]
        for half, name in enumerate(collectives):
            if name and self.machine.num_devices > 1 and (half == 0 or self._flows(value)):
                line: AlphaBeta = getattr(self.machine.times, name)
                moved[half] = (self._flat(line.seconds(value.size_bytes)),)
        return self._price(self._none, (moved[0], moved[1]))

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

    def _computed(self, operator: SpmdOperator, placed: Rule | Computation) -> tuple[Costs, Costs]:
        if operator.kind in FREE_KINDS:
            return (), ()
        value_of, part, whole, units = self.graph.value_of, 0, 0, 0
        for name, place in operator.operands(placed.inputs, placed.outputs):
            size = value_of[name].size_bytes
            part, whole = (part + size, whole) if place.is_shard else (part, whole + size)
            units = units or place.units or 0
        backward: Costs = ()
        flops = (operator.flops, 0.0) if units else (0.0, operator.flops)
        if any(self._flows(value_of[name]) for name in operator.outputs):
            wanted = sum(value_of[name].requires_grad for name in operator.inputs)
            if count := min(wanted, 2) if operator.flops else 1:
                backward = (self._roofline(count, units, flops, (part, whole)),)
        return (self._roofline(1, units, flops, (part, whole)),), backward

    def _roofline(
        self, count: int, units: int, flops: tuple[float, float], moved: tuple[float, float]
    ) -> ShareCost:
        """Passes over what is divided and what is whole, of operations and of bytes."""
        speeds = self.machine.speeds
        return tuple(
            ShareLine(count * (speeds.launch_s + whole / per_s), count * part / per_s, units)
            for (part, whole), per_s in (
                (flops, speeds.flops_per_s),
                (moved, speeds.memory_bytes_per_s),
            )
        )

    def conversion(self, value: SpmdValue, source: Placement, target: Placement) -> Price:
        """A value in another placement, forwards and backwards in the cheapest way."""
        alike = (value.size_bytes, value.requires_grad, value.source, source, target)
        if alike not in self._known:
            forward, backward = self._collective(value.size_bytes, source, target), _NOTHING
            if self._flows(value):
                backward = self._collective(value.size_bytes, target.dual, source.dual)
                if is_summed_later(value, source, target) and self.machine.num_devices > 1:
                    line = self.machine.times.all_reduce
                    in_bucket_s = line.in_bucket_s(value.size_bytes, BUCKET_BYTES)
                    backward = ((self._flat(in_bucket_s),),)
            kinds = source.kind, target.kind
            is_new = kinds in FORWARD or kinds == (_S, _P)
            memory = self._kept(value, target) if is_new else self._none
            moved = min(forward, key=self._total_s), min(backward, key=self._total_s)
            self._known[alike] = self._price(memory, moved)
        return self._known[alike]

    def _collective(
        self, size_bytes: float, source: Placement, target: Placement
    ) -> tuple[Costs, ...]:
        """What a move takes in each way that there is."""
        name, times = FORWARD.get((source.kind, target.kind)), self.machine.times
        if name is None or source == target or self.machine.num_devices == 1:
            return _NOTHING
        if name == "all-gather":
            return self._shards(size_bytes, source, times.all_gather, times.broadcast)
        if name == "reduce-scatter":
            return self._shards(size_bytes, target, times.reduce_scatter, times.reduce)
        if name == "all-to-all":
            return ((self._padded(times.all_to_all, size_bytes, source, target),),)
        return ((self._flat(times.all_reduce_s(size_bytes)),),)

    def _shards(
        self, size_bytes: float, shard: Placement, padded: AlphaBeta, single: AlphaBeta
    ) -> tuple[Costs, ...]:
        """All shards at once, as long as the largest, or one after the other."""
        grouped_s = self.machine.num_devices * single.alpha_s + single.beta_s_per_byte * size_bytes
        return (self._padded(padded, size_bytes, shard),), (self._flat(grouped_s),)

    def _flat(self, seconds: float) -> ShareCost:
        return (ShareLine(self._none + seconds, self._none),)

    def _padded(self, line: AlphaBeta, size_bytes: float, *shards: Placement) -> ShareCost:
        """All parts as long as the largest: devices times it in bytes."""
        alpha_s = self._none + line.alpha_s
        slope_s = self._none + line.beta_s_per_byte * size_bytes * self.machine.num_devices
        return tuple(ShareLine(alpha_s, slope_s, shard.units or 0) for shard in shards)

    def _flows(self, value: SpmdValue) -> bool:
        """Whether there is a gradient of a value."""
        return self.machine.is_training and value.requires_grad

    def _kept(self, value: SpmdValue, placement: Placement) -> Vector:
        """Bytes of a tensor, where a backward may read it."""
        if not self._flows(value):
            return self._none
        return value.size_bytes * self.parts.of_placement(placement)

    def _price(
        self,
        memory_bytes: Vector,
        moved: tuple[Costs, Costs] = ((), ()),
        computed: tuple[Costs, Costs] = ((), ()),
    ) -> Price:
        """What moves and what is computed, forwards and backwards each, as a price."""
        one, other = map(self._half, moved, computed)
        seconds = sum(self._total_s((*half.moved, *half.computed)) for half in (one, other))
        return Price(seconds, memory_bytes, (one, other))

    def _half(self, moved: Costs, computed: Costs) -> Half:
        compute_s = sum(map(self.parts.seconds_each, computed), self._none)
        return Half(moved, computed, self._total_s(moved), compute_s)

    def _total_s(self, costs: Costs) -> float:
        """Seconds of costs one after the other."""
        return sum(map(self.parts.seconds, costs))
