"""The room's one price list: what every instruction takes, and leaves in memory."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_gpp.spmd.costs.collective_times import CollectiveTimes
from lightning_gpp.spmd.costs.computations import ComputationCosts
from lightning_gpp.spmd.costs.memory import MemoryCosts
from lightning_gpp.spmd.costs.moves import FORWARD, MoveCosts, Ways
from lightning_gpp.spmd.costs.share_cost import Parts, ShareCost, Vector
from lightning_gpp.spmd.costs.speeds import DeviceSpeeds
from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator, SpmdValue, ValueSource
from lightning_gpp.spmd.placement import Placement, PlacementKind
from lightning_gpp.spmd.program import (
    Computation,
    Conversion,
    Instruction,
    Method,
    Option,
    ReceiveInput,
)
from lightning_gpp.spmd.rules.rule import Rule


@dataclass(frozen=True, eq=False)
class Machine:
    """The devices that a program is for.

    Attributes:
        speeds: how fast each computes.
        times: of collectives over all of them.
        memory_bytes: of each, shape ``(num_devices,)``; infinite where there is no limit.
        optimizer_tensors: tensors of a parameter's size that training holds beside it, its gradient
            included (Adam: 3, SGD: 1).
        is_training: whether there is a backward.
    """

    speeds: DeviceSpeeds
    times: CollectiveTimes
    memory_bytes: Vector
    optimizer_tensors: int = 3
    is_training: bool = True

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.memory_bytes)

    @cached_property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """The devices in groups of equal speeds and memory, by the first of each."""
        speeds = self.speeds
        columns = (speeds.flops_per_s, speeds.memory_bytes_per_s, speeds.launch_s)
        found: dict[tuple[float, ...], list[int]] = {}
        for device, key in enumerate(zip(*(c.tolist() for c in (*columns, self.memory_bytes)))):
            found.setdefault(key, []).append(device)
        return tuple(map(tuple, found.values()))


@dataclass(frozen=True, slots=True, eq=False)
class Price:
    """What something comes to with given shares.

    Attributes:
        seconds: forwards and backwards, with what the memory counts for.
        memory_bytes: that stay on every device, shape ``(num_devices,)``.
        method: the cheapest way forwards.
        backward_method: the cheapest way backwards.
    """

    seconds: float
    memory_bytes: Vector
    method: Method = Method.NONE
    backward_method: Method = Method.NONE


@dataclass(frozen=True, slots=True, eq=False)
class Half:
    """The forward or the backward of an instruction.

    Attributes:
        compute_s: seconds of every device, shape ``(num_devices,)``.
        move_s: seconds of a collective of all devices before it; zero where there is none.
    """

    compute_s: Vector
    move_s: float = 0.0


class PriceList:
    """PriceList of a graph's instructions.

    Args:
        graph: the model.
        machine: the devices.
        shares: one vector per segment.
        memory_price: seconds that a byte left on a device counts for, shape ``(num_devices,)``: a
            search that is to save memory adds them to its prices. Nothing if not given.
    """

    def __init__(
        self,
        graph: SpmdGraph,
        machine: Machine,
        shares: tuple[tuple[float, ...], ...],
        memory_price: Vector | None = None,
    ) -> None:
        self._memory_price = memory_price
        self.graph = graph
        self.machine = machine
        self.parts = Parts(shares)
        training = machine.is_training
        self._computations = ComputationCosts(graph, machine.speeds, is_training=training)
        self._moves = MoveCosts(machine.times, machine.num_devices, is_training=training)
        self._memory = MemoryCosts(
            graph,
            self.parts,
            optimizer_tensors=machine.optimizer_tensors,
            is_training=training,
        )
        self._none = np.zeros(machine.num_devices)
        self._known: dict[Hashable, Price] = {}

    def costs_of(self, instruction: Instruction) -> tuple[ShareCost, ...]:
        """What an instruction takes, as functions of the shares, one after the other."""
        value_of = self.graph.value_of
        if isinstance(instruction, Computation):
            operator = self.graph.operator_of[instruction.operator]
            found = self._computations.of(
                operator, instruction.inputs, instruction.outputs, instruction.option
            )
            if instruction.option is not Option.SUFFICIENT_FACTORS:
                return found
            return (*found, *self._factors(operator, instruction)[instruction.method])
        value = value_of[instruction.value]
        if isinstance(instruction, Conversion):
            ways = self._moves.conversion(value, instruction.source, instruction.target)
            return (
                *ways.forward[instruction.method],
                *ways.backward[instruction.backward_method],
            )
        if isinstance(instruction, ReceiveInput):
            return self._moves.receive(value, instruction.placement)
        return self._moves.give(value, instruction.placement)

    def half(self, instruction: Instruction, *, is_backward: bool) -> Half:
        """What an instruction takes forwards, or backwards."""
        value_of, side = self.graph.value_of, int(is_backward)
        if isinstance(instruction, Computation):
            costs = self._computations.half(instruction, is_backward=is_backward)
            compute_s = sum((self.parts.seconds_each(cost) for cost in costs), self._none)
            if not is_backward or instruction.option is not Option.SUFFICIENT_FACTORS:
                return Half(compute_s)
            operator = self.graph.operator_of[instruction.operator]
            gathers = self._factors(operator, instruction)[instruction.method]
            return Half(compute_s, self.total_s(gathers))
        value = value_of[instruction.value]
        if self.machine.num_devices == 1:
            return Half(self._none)
        if isinstance(instruction, Conversion):
            ways = self._moves.conversion(value, instruction.source, instruction.target)
            method = (instruction.method, instruction.backward_method)[side]
            moved = (ways.forward, ways.backward)[side][method]
        elif isinstance(instruction, ReceiveInput):
            moved = self._moves.receive(value, instruction.placement)[side : side + 1]
        else:
            moved = self._moves.give(value, instruction.placement)[side : side + 1]
        return Half(self._none, self.total_s(moved))

    def memory_of(self, instruction: Instruction) -> Vector:
        """Bytes that an instruction leaves on every device."""
        if isinstance(instruction, Computation):
            operator = self.graph.operator_of[instruction.operator]
            return self._memory.made(operator, instruction.outputs)
        if isinstance(instruction, Conversion):
            value = self.graph.value_of[instruction.value]
            return self._converted(value, instruction.source, instruction.target)
        return self._none

    def stored(self, value: SpmdValue, placement: Placement) -> Price:
        """A parameter or buffer kept in a placement."""
        return self._price(0.0, self._memory.stored(value, placement))

    def received(self, value: SpmdValue, placement: Placement) -> Price:
        """An input of the forward."""
        return Price(self.total_s(self._moves.receive(value, placement)), self._none)

    def given(self, value: SpmdValue, placement: Placement) -> Price:
        """An output of the forward."""
        return Price(self.total_s(self._moves.give(value, placement)), self._none)

    def computation(self, operator: SpmdOperator, rule: Rule) -> Price:
        """An operator by a rule; worked out once for all that are alike (equal layers)."""
        values = [self.graph.value_of[name] for name in (*operator.inputs, *operator.outputs)]
        alike = (
            *(operator.kind, operator.flops, rule.inputs, rule.outputs, rule.option),
            *((value.size_bytes, value.requires_grad) for value in values),
        )
        if alike not in self._known:
            self._known[alike] = self._computation(operator, rule)
        return self._known[alike]

    def _computation(self, operator: SpmdOperator, rule: Rule) -> Price:
        costs = self._computations.of(operator, rule.inputs, rule.outputs, rule.option)
        memory = self._memory.made(operator, rule.outputs)
        seconds, method = self.total_s(costs), Method.NONE
        if rule.option is Option.SUFFICIENT_FACTORS:
            more_s, method = self._best(self._factors(operator, rule))
            seconds += more_s
        return self._price(seconds, memory, method)

    def conversion(self, value: SpmdValue, source: Placement, target: Placement) -> Price:
        """A value in another placement, each way by the cheapest method."""
        ways = self._moves.conversion(value, source, target)
        forward_s, method = self._best(ways.forward)
        backward_s, backward_method = self._best(ways.backward)
        memory = self._converted(value, source, target)
        return self._price(forward_s + backward_s, memory, method, backward_method)

    def _price(
        self,
        seconds: float,
        memory_bytes: Vector,
        method: Method = Method.NONE,
        backward_method: Method = Method.NONE,
    ) -> Price:
        if self._memory_price is not None:
            seconds += float(self._memory_price @ memory_bytes)
        return Price(seconds, memory_bytes, method, backward_method)

    def total_s(self, costs: tuple[ShareCost, ...]) -> float:
        """Seconds of costs one after the other."""
        return sum(map(self.parts.seconds, costs))

    def _factors(self, operator: SpmdOperator, placed: Rule | Computation) -> Ways:
        names = (*operator.inputs, *operator.outputs)
        places = dict(zip(names, (*placed.inputs, *placed.outputs)))
        return self._moves.factors(operator, self.graph.value_of, places)

    def _converted(self, value: SpmdValue, source: Placement, target: Placement) -> Vector:
        kinds = (source.kind, target.kind)
        if kinds in FORWARD or kinds == (PlacementKind.SHARD, PlacementKind.PARTIAL):
            return self._memory.kept(value, target)
        return self._none

    def _best(self, ways: Ways) -> tuple[float, Method]:
        found = [(self.total_s(costs), method) for method, costs in ways.items()]
        return min(found, key=lambda each: each[0])


def is_given(value: SpmdValue) -> bool:
    """Whether a value is there without an operator."""
    return value.source is not ValueSource.OPERATOR
