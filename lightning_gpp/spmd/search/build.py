"""From the choices of a search to a program."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpp.spmd.costs.prices import PriceList, is_given
from lightning_gpp.spmd.operator_graph import SpmdGraph, ValueSource
from lightning_gpp.spmd.placement import Placement
from lightning_gpp.spmd.program import (
    Computation,
    Conversion,
    Instruction,
    ReceiveInput,
    ReturnOutput,
    SpmdProgram,
)
from lightning_gpp.spmd.search.labels import Choice
from lightning_gpp.spmd.search.steps import SearchStep
from lightning_gpp.spmd.search.value_table import Obtained, ValueTable


class ProgramBuilder:
    """Writes instructions down.

    Args:
        graph: the model.
        prices: of the search.
        tables: of every value.
    """

    def __init__(self, graph: SpmdGraph, prices: PriceList, tables: dict[str, ValueTable]) -> None:
        self._graph = graph
        self._prices = prices
        self._tables = tables
        self._there: dict[str, set[Placement]] = {}
        self._storage: dict[str, Placement] = {}
        self._instructions: list[Instruction] = []

    def program(
        self, steps: Sequence[SearchStep], choices: Sequence[Choice], name: str
    ) -> SpmdProgram:
        """The program of a choice per step."""
        for step, choice in zip(steps, choices, strict=True):
            self._step(step, choice)
        return SpmdProgram(
            self._prices.parts.shares, self._storage, tuple(self._instructions), name
        )

    def _step(self, step: SearchStep, choice: Choice) -> None:
        priced = step.rules[choice.rule]
        for begun in priced.begun:
            self._obtain(begun.value, begun.way)
        for read, way in choice.ways:
            self._obtain(priced.reads[read][0], way)
        rule, operator = priced.rule, step.operator
        if operator is None:
            assert step.value is not None
            (placement,) = rule.inputs
            self._instructions.append(ReturnOutput(step.value, placement))
            return
        method = self._prices.computation(operator, rule).method
        self._instructions.append(
            Computation(operator.name, rule.inputs, rule.outputs, rule.option, method, rule.note)
        )
        for name, placement in zip(operator.outputs, rule.outputs):
            self._there[name] = {placement}

    def _obtain(self, name: str, way: Obtained) -> None:
        """Begins a value where it has not begun, and makes its conversions."""
        table, value = self._tables[name], self._graph.value_of[name]
        if name not in self._there:
            first = way.path[0][0] if way.path else way.placements.bit_length() - 1
            placement = table.placements[first]
            self._there[name] = {placement}
            if value.source is ValueSource.INPUT:
                self._instructions.append(ReceiveInput(name, placement))
            elif is_given(value):
                self._storage[name] = placement
        for source, target in way.path:
            one, other = table.placements[source], table.placements[target]
            if other in self._there[name]:
                continue
            price = self._prices.conversion(value, one, other)
            self._instructions.append(
                Conversion(name, one, other, price.method, price.backward_method)
            )
            self._there[name].add(other)
