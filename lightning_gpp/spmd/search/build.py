"""From the answer of a search to a program."""

from __future__ import annotations

from lightning_gpp.spmd.costs.prices import is_given
from lightning_gpp.spmd.operator_graph import ValueSource
from lightning_gpp.spmd.placement import Placement
from lightning_gpp.spmd.program import (
    Computation,
    Conversion,
    Instruction,
    ReceiveInput,
    ReturnOutput,
    SpmdProgram,
)
from lightning_gpp.spmd.rules.rule import Rule
from lightning_gpp.spmd.search.factor_graph import FactorGraph, ProgramAnswer, SearchStep
from lightning_gpp.spmd.search.obtain import Obtained


def program_of(factor_graph: FactorGraph, answer: ProgramAnswer, name: str) -> SpmdProgram:
    """The instructions of all steps; conversions are made where their result is first read."""
    program = _Instructions(factor_graph)
    reads: list[list[tuple[str, Obtained]]] = [[] for _ in factor_graph.steps]
    for factor, number in zip(factor_graph.factors, answer.paid, strict=True):
        if factor.value:
            reads[factor.step].append((factor.value, factor.costs.ways[number]))
    for step, rule, ways in zip(factor_graph.steps, answer.rules, reads, strict=True):
        for value, way in ways:
            program.obtain(value, way)
        program.step(step, step.rules[rule])
    return SpmdProgram(
        factor_graph.prices.parts.shares, program.storage, tuple(program.instructions), name
    )


class _Instructions:
    """Instructions as they are written down."""

    def __init__(self, factor_graph: FactorGraph) -> None:
        self.storage: dict[str, Placement] = {}
        self.instructions: list[Instruction] = []
        self._factor_graph = factor_graph
        self._there: dict[str, set[Placement]] = {}

    def step(self, step: SearchStep, rule: Rule) -> None:
        """A computation, or the return of an output."""
        operator = step.operator
        if operator is None:
            self.instructions.append(ReturnOutput(step.reads[0], rule.inputs[0]))
            return
        method = self._factor_graph.prices.computation(operator, rule).method
        self.instructions.append(
            Computation(operator.name, rule.inputs, rule.outputs, rule.option, method, rule.note)
        )
        self._there |= {n: {p} for n, p in zip(operator.outputs, rule.outputs)}

    def obtain(self, name: str, way: Obtained) -> None:
        """Begins a value where it has not begun, and makes its conversions."""
        table, value = self._factor_graph.tables[name], self._factor_graph.graph.value_of[name]
        if name not in self._there:
            first = way.path[0][0] if way.path else way.placements.bit_length() - 1
            placement = table.placements[first]
            self._there[name] = {placement}
            if value.source is ValueSource.INPUT:
                self.instructions.append(ReceiveInput(name, placement))
            elif is_given(value):
                self.storage[name] = placement
        for source, target in way.path:
            one, other = table.placements[source], table.placements[target]
            if other in self._there[name]:
                continue
            price = self._factor_graph.prices.conversion(value, one, other)
            self.instructions.append(
                Conversion(name, one, other, price.method, price.backward_method)
            )
            self._there[name].add(other)
