"""The room's one price list: what every instruction takes, and leaves in memory."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_gpp.spmd.costs.collective_times import CollectiveTimes
from lightning_gpp.spmd.costs.computations import ComputationCosts
from lightning_gpp.spmd.costs.memory import MemoryCosts
from lightning_gpp.spmd.costs.moves import FORWARD, MoveCosts, TwoWays, Ways
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
        columns = (
            *(speeds.flops_per_s, speeds.memory_bytes_per_s, speeds.launch_s),
            *(speeds.update_s_per_byte, self.memory_bytes),
        )
        found: dict[tuple[float, ...], list[int]] = {}
        for device, key in enumerate(zip(*(column.tolist() for column in columns))):
            found.setdefault(key, []).append(device)
        return tuple(map(tuple, found.values()))


@dataclass(frozen=True, slots=True, eq=False)
class Half:
    """The forward or the backward of an instruction: a collective of all devices, then computing.

    Attributes:
        moved: the collective, as functions of the shares, one after the other.
        computed: likewise.
        move_s: seconds of the collective; zero where there is none.
        compute_s: seconds of every device, shape ``(num_devices,)``.
    """

    moved: tuple[ShareCost, ...]
    computed: tuple[ShareCost, ...]
    move_s: float
    compute_s: Vector


@dataclass(frozen=True, slots=True, eq=False)
class Price:
    """What something comes to with given shares.

    Attributes:
        seconds: forwards and backwards, each cost on its slowest device.
        memory_bytes: that stay on every device, shape ``(num_devices,)``.
        halves: its forward and its backward.
        method: the way forwards.
        backward_method: the way backwards.
    """

    seconds: float
    memory_bytes: Vector
    halves: tuple[Half, Half]
    method: Method = Method.NONE
    backward_method: Method = Method.NONE


class PriceList:
    """Prices of a graph's instructions, worked out once for all that are alike (equal layers).

    Args:
        graph: the model.
        machine: the devices.
        shares: of the devices.
    """

    def __init__(self, graph: SpmdGraph, machine: Machine, shares: tuple[float, ...]) -> None:
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

    def of(self, instruction: Instruction) -> Price:
        """An instruction of a program."""
        if isinstance(instruction, Computation):
            operator = self.graph.operator_of[instruction.operator]
            return self.computation(operator, instruction, instruction.method)
        value = self.graph.value_of[instruction.value]
        if isinstance(instruction, Conversion):
            methods = instruction.method, instruction.backward_method
            return self.conversion(value, instruction.source, instruction.target, methods)
        if isinstance(instruction, ReceiveInput):
            return self.received(value, instruction.placement)
        return self.given(value, instruction.placement)

    def stored(self, value: SpmdValue, placement: Placement) -> Price:
        """A parameter or buffer kept in a placement; backwards the optimizer's step follows."""
        update = self._computations.update(value, placement)
        return self._price(((), ()), ((), update), self._memory.stored(value, placement))

    def received(self, value: SpmdValue, placement: Placement) -> Price:
        """An input of the forward."""
        return self._price(self._moves.receive(value, placement), ((), ()), self._none)

    def given(self, value: SpmdValue, placement: Placement) -> Price:
        """An output of the forward."""
        return self._price(self._moves.give(value, placement), ((), ()), self._none)

    def computation(
        self, operator: SpmdOperator, placed: Rule | Computation, method: Method | None = None
    ) -> Price:
        """An operator on parts; factors gathered by a method, the cheapest one if not given."""
        values = [self.graph.value_of[name] for name in (*operator.inputs, *operator.outputs)]
        alike = (
            *(operator.kind, operator.flops, placed.inputs, placed.outputs, placed.option, method),
            *((value.size_bytes, value.requires_grad) for value in values),
        )
        if alike not in self._known:
            self._known[alike] = self._computation(operator, placed, method)
        return self._known[alike]

    def _computation(
        self, operator: SpmdOperator, placed: Rule | Computation, method: Method | None
    ) -> Price:
        computed = self._computations.halves(operator, placed.inputs, placed.outputs, placed.option)
        moved: tuple[ShareCost, ...] = ()
        if placed.option is Option.SUFFICIENT_FACTORS:
            places = dict(operator.operands(placed.inputs, placed.outputs))
            ways = self._moves.factors(operator, self.graph.value_of, places)
            method = method or self._best(ways)
            moved = ways[method]
        memory = self._memory.made(operator, placed.outputs)
        return self._price(((), moved), computed, memory, (method or Method.NONE, Method.NONE))

    def conversion(
        self,
        value: SpmdValue,
        source: Placement,
        target: Placement,
        methods: tuple[Method, Method] | None = None,
    ) -> Price:
        """A value in another placement, forwards and backwards by the cheapest methods or these."""
        alike = (value.size_bytes, value.requires_grad, value.source, source, target, methods)
        if alike not in self._known:
            ways = self._moves.conversion(value, source, target)
            method, back = methods or (self._best(ways.forward), self._best(ways.backward))
            memory = self._converted(value, source, target)
            moved = ways.forward[method], ways.backward[back]
            self._known[alike] = self._price(moved, ((), ()), memory, (method, back))
        return self._known[alike]

    def _price(
        self,
        moved: TwoWays,
        computed: TwoWays,
        memory_bytes: Vector,
        methods: tuple[Method, Method] = (Method.NONE, Method.NONE),
    ) -> Price:
        """What moves and what is computed, forwards and backwards each, as a price."""
        halves = self._half(moved[0], computed[0]), self._half(moved[1], computed[1])
        seconds = sum(self._total_s((*half.moved, *half.computed)) for half in halves)
        return Price(seconds, memory_bytes, halves, *methods)

    def _half(self, moved: tuple[ShareCost, ...], computed: tuple[ShareCost, ...]) -> Half:
        compute_s = sum(map(self.parts.seconds_each, computed), self._none)
        return Half(moved, computed, self._total_s(moved), compute_s)

    def _total_s(self, costs: tuple[ShareCost, ...]) -> float:
        """Seconds of costs one after the other."""
        return sum(map(self.parts.seconds, costs))

    def _converted(self, value: SpmdValue, source: Placement, target: Placement) -> Vector:
        kinds = (source.kind, target.kind)
        if kinds in FORWARD or kinds == (PlacementKind.SHARD, PlacementKind.PARTIAL):
            return self._memory.kept(value, target)
        return self._none

    def _best(self, ways: Ways) -> Method:
        return min(ways, key=lambda method: self._total_s(ways[method]))


def is_given(value: SpmdValue) -> bool:
    """Whether a value is there without an operator."""
    return value.source is not ValueSource.OPERATOR
