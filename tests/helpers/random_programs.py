"""Programs drawn at random from the theory: any rule of every operator, any way to get there."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_gpp.spmd.operator_graph import SpmdGraph, ValueSource
from lightning_gpp.spmd.placement import PARTIAL, R_SAME, Placement
from lightning_gpp.spmd.program import (
    Computation,
    Instruction,
    Move,
    SpmdProgram,
)
from lightning_gpp.spmd.rules.theory import Rule, Theory


class _Drawing:
    """Draws one program."""

    def __init__(
        self,
        graph: SpmdGraph,
        shares: tuple[float, ...],
        draw: random.Random,
        stay: float,
        storage: Mapping[str, Placement] | None,
    ) -> None:
        self.graph, self.shares, self.draw, self.stay = graph, shares, draw, stay
        self.theory = Theory(graph, len(shares))
        self.there: dict[str, list[Placement]] = {}
        self.instructions: list[Instruction] = []
        self.storage: dict[str, Placement] = {}
        self.given = storage

    def placements(self, name: str) -> list[Placement]:
        """Those that a value may have; whole numbers have no summands here."""
        value = self.graph.value_of[name]
        found = self.theory.placements(name)
        return [p for p in found if p != PARTIAL or value.spec.is_differentiable]

    def begin(self) -> None:
        for value in self.graph.values:
            if value.source is ValueSource.OPERATOR:
                continue
            if value.source is ValueSource.INPUT:
                can = [p for p in self.placements(value.name) if p != PARTIAL]
                placement = self.draw.choice(can)
                self.instructions.append(Move(value.name, None, placement))
            else:
                can = [R_SAME, *self.theory.shards(value.name)]
                is_plain = value.source is ValueSource.BUFFER
                placement = R_SAME if is_plain else self.draw.choice(can)
                if self.given is not None:
                    placement = self.given.get(value.name, R_SAME)
                self.storage[value.name] = placement
            self.there[value.name] = [placement]

    def want(self, name: str, placement: Placement) -> None:
        """Converts a value, sometimes by a detour."""
        if placement in self.there[name]:
            return
        if self.draw.random() < 0.2:
            self.convert(name, self.draw.choice(self.placements(name)))
        self.convert(name, placement)

    def convert(self, name: str, placement: Placement) -> None:
        if placement in self.there[name]:
            return
        source = self.draw.choice(self.there[name])
        self.instructions.append(Move(name, source, placement))
        self.there[name].append(placement)

    def rule(self, operator_name: str) -> Rule:
        operator = self.graph.operator_of[operator_name]
        rules = [
            rule
            for rule in self.theory.rules(operator)
            if all(
                p != PARTIAL or self.graph.value_of[name].spec.is_differentiable
                for name, p in zip(operator.inputs, rule.inputs, strict=True)
            )
        ]
        fitting = [
            rule
            for rule in rules
            if all(
                p in self.there[name] for name, p in zip(operator.inputs, rule.inputs, strict=True)
            )
        ]
        can = fitting if fitting and self.draw.random() < self.stay else rules
        sharded = [r for r in can if any(p.is_shard for p in (*r.inputs, *r.outputs))]
        return self.draw.choice(sharded if sharded and self.draw.random() < 0.7 else can)

    def run(self) -> SpmdProgram:
        self.begin()
        for operator in self.graph.operators:
            rule = self.rule(operator.name)
            for name, placement in zip(operator.inputs, rule.inputs, strict=True):
                self.want(name, placement)
            made = rule.inputs, rule.outputs, rule.option
            self.instructions.append(Computation(operator.name, *made))
            for name, placement in zip(operator.outputs, rule.outputs, strict=True):
                self.there[name] = [placement]
        for name in dict.fromkeys(self.graph.outputs):
            placement = self.draw.choice(self.placements(name))
            self.want(name, placement)
            self.instructions.append(Move(name, placement, None))
        return SpmdProgram(self.shares, self.storage, tuple(self.instructions), "drawn")


def random_program(
    graph: SpmdGraph,
    shares: Sequence[float],
    draw: random.Random,
    *,
    stay: float = 0.5,
    storage: Mapping[str, Placement] | None = None,
) -> SpmdProgram:
    """A valid program.

    Args:
        graph: the model.
        shares: of the devices.
        draw: random numbers.
        stay: how often a rule is chosen that needs no conversion, if there is one.
        storage: how parameters are stored; drawn as well where it is not given.
    """
    return _Drawing(graph, tuple(shares), draw, stay, storage).run()


@dataclass(frozen=True)
class DrawsPrograms:
    """A planner that draws programs.

    Attributes:
        seed: of its random numbers.
    """

    seed: int

    def __call__(
        self,
        graph: SpmdGraph,
        shares: Sequence[float],
        storage: Mapping[str, Placement] | None,
    ) -> SpmdProgram:
        draw = random.Random(f"{self.seed} {graph.outputs}")
        return random_program(graph, shares, draw, storage=storage)


def replicated_program(graph: SpmdGraph, num_devices: int) -> SpmdProgram:
    """Every device does everything."""
    instructions: list[Instruction] = [
        Move(value.name, None, R_SAME) for value in graph.of_source(ValueSource.INPUT)
    ]
    for operator in graph.operators:
        inputs, outputs = len(operator.inputs), len(operator.outputs)
        instructions.append(Computation(operator.name, (R_SAME,) * inputs, (R_SAME,) * outputs))
    instructions += [Move(name, R_SAME, None) for name in dict.fromkeys(graph.outputs)]
    shares = (1 / num_devices,) * num_devices
    return SpmdProgram(shares, {}, tuple(instructions), "replicated")
