"""The choice of a program as variables, and costs that depend on some of them.

A variable is the rule of an operator (or the placement in which an output is returned), or, of a
value that several operators read, in which placements it is there after one of them. Every read is
a cost of the rules that make and read a value and of what is there before and after. Conversions
are only made where a rule reads their result: one that is made earlier could as well wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.spmd.costs.machine import Machine, Vector
from lightning_gpp.spmd.costs.prices import PriceList
from lightning_gpp.spmd.operator_graph import SpmdOperator, SpmdValue, ValueSource
from lightning_gpp.spmd.placement import PARTIAL, R_SAME, Placement
from lightning_gpp.spmd.program import (
    Computation,
    Instruction,
    Move,
    SpmdProgram,
)
from lightning_gpp.spmd.rules.theory import Rule, Theory
from lightning_gpp.spmd.search.choices import Allowed, Obtained, ValueTable


@dataclass(frozen=True, slots=True)
class SearchStep:
    """One step of a program.

    Attributes:
        operator: the operator; None for a return.
        reads: names of the values that it reads; of a return the value that is returned.
        rules: what may be done; a return has a rule per placement.
    """

    operator: SpmdOperator | None
    reads: tuple[str, ...]
    rules: tuple[Rule, ...]


@dataclass(frozen=True, eq=False)
class FactorCosts:
    """Costs that depend on some variables; shared by equal layers.

    Attributes:
        shape: numbers of values of the variables.
        places: values of the variables that each cost is of, a row each. There may be several
            costs of the same values, of which one has to be paid, and none where it cannot be.
        seconds: of each cost.
        memory_bytes: of each, on all devices with a limit together.
        ways: of each of a read; empty for an operator's own.
    """

    shape: tuple[int, ...]
    places: NDArray[np.intp]
    seconds: Vector
    memory_bytes: Vector
    ways: tuple[Obtained, ...] = ()

    def priced(self, byte_s: float) -> Vector:
        """Seconds of each, with bytes at a price."""
        return self.seconds + self.memory_bytes * byte_s


@dataclass(frozen=True, slots=True)
class Factor:
    """Costs, and the variables that they depend on.

    Attributes:
        variables: whose values they are by.
        costs: of them.
        step: that pays.
        value: the name of what is read; empty for an operator's own costs.
    """

    variables: tuple[int, ...]
    costs: FactorCosts
    step: int
    value: str = ""


class FactorGraph:
    """The question which program is cheapest.

    Args:
        theory: what may be done.
        machine: the devices.
        shares: of the devices.
        allowed: what the program is limited to.

    Attributes:
        steps: of the program, in order.
        sizes: number of values of every variable; the first are the rules of the steps.
        factors: costs, by step and in the order of its reads.
        tables: conversions of every value.
    """

    def __init__(
        self, theory: Theory, machine: Machine, shares: tuple[float, ...], allowed: Allowed
    ) -> None:
        self.graph, self._theory, self._allowed = theory.graph, theory, allowed
        self.prices = PriceList(self.graph, machine, shares)
        self._limited = np.flatnonzero(np.isfinite(machine.memory_bytes)).tolist()
        self._known: dict[Any, Any] = {}
        self._rules = {operator.name: self._rules_of(operator) for operator in self.graph.operators}
        self.tables = self._tables()
        self.steps = list(self._steps())
        self.sizes = [len(step.rules) for step in self.steps]
        self.factors = list(self._factors())

    def _once(self, key: Any, make: Callable[..., Any], *args: Any) -> Any:
        """What is made for one of equal layers serves all."""
        if key not in self._known:
            self._known[key] = make(*args)
        return self._known[key]

    def _rules_of(self, operator: SpmdOperator) -> tuple[Rule, ...]:
        found = self._theory.rules(operator)
        return tuple(rule for rule in found if self._allowed.rule(operator, rule)) or found[:2]

    def _tables(self) -> dict[str, ValueTable]:
        """Of every value, for what a rule reads or makes, and all that conversions may pass."""
        found = {v.name: dict.fromkeys(self._theory.placements(v.name)) for v in self.graph.values}
        for operator in self.graph.operators:
            for rule in self._rules[operator.name]:
                for name, placement in operator.operands(rule.inputs, rule.outputs):
                    found[name][placement] = None
        tables = {}
        for value in self.graph.values:
            stored = self._storages(value)
            placements = (*found[value.name], *stored)
            key = (value.size_bytes, value.requires_grad, value.source, placements, stored)
            tables[value.name] = self._once(key, self._table, value, placements, stored)
        return tables

    def _table(
        self, value: SpmdValue, placements: tuple[Placement, ...], stored: tuple[Placement, ...]
    ) -> ValueTable:
        placements = tuple(dict.fromkeys(placements))
        begun = [(placement, self.prices.stored(value, placement)) for placement in stored]
        if value.source is ValueSource.INPUT:
            begun = [(p, self.prices.move(value, None, p)) for p in placements if p != PARTIAL]
        return ValueTable(value, placements, self.prices, self._limited, begun, self._allowed)

    def _storages(self, value: SpmdValue) -> tuple[Placement, ...]:
        """How a parameter or buffer may be kept."""
        if value.source is ValueSource.PARAMETER:
            shards = self._theory.shards(value.name) if value.requires_grad else ()
            return self._allowed.storages(value, (R_SAME, *shards))
        return (R_SAME,) if value.source is ValueSource.BUFFER else ()

    def _steps(self) -> Iterator[SearchStep]:
        def returned(names: Sequence[str]) -> Iterator[SearchStep]:
            for name in dict.fromkeys(names):
                placements = self.tables[name].placements
                rules = tuple(Rule((each,), ()) for each in placements)
                yield SearchStep(None, (name,), rules)

        outputs, value_of = self.graph.outputs, self.graph.value_of
        yield from returned([name for name in outputs if value_of[name].is_given])
        for operator in self.graph.operators:
            reads = tuple(dict.fromkeys(operator.inputs))
            yield SearchStep(operator, reads, self._rules[operator.name])
            yield from returned([name for name in operator.outputs if name in outputs])

    def _factors(self) -> Iterator[Factor]:
        last = {name: number for number, step in enumerate(self.steps) for name in step.reads}
        states: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        for number, step in enumerate(self.steps):
            yield Factor((number,), self._own_costs(step), number)
            for name in step.reads:
                variables, before = states.get(name, ((), (0,)))
                wanted = tuple(self._wanted(step, rule, name) for rule in step.rules)
                is_last, table = last[name] == number, self.tables[name]
                key = table, before, wanted, is_last
                costs, after = self._once(key, _reading, *key)
                variables = (*variables, number)
                if not is_last:
                    states[name] = (len(self.sizes),), after
                    variables = (*variables, len(self.sizes))
                    self.sizes.append(len(after))
                yield Factor(variables, costs, number, name)
            for place, name in enumerate(step.operator.outputs if step.operator else ()):
                makes = [self.tables[name].placements.index(r.outputs[place]) for r in step.rules]
                states[name] = (number,), tuple(1 << each for each in makes)

    def _wanted(self, step: SearchStep, rule: Rule, name: str) -> tuple[int, ...]:
        """Places of the placements in which a rule reads a value."""
        inputs = step.operator.inputs if step.operator else step.reads
        placements = dict.fromkeys(p for n, p in zip(inputs, rule.inputs) if n == name)
        return tuple(self.tables[name].placements.index(placement) for placement in placements)

    def _own_costs(self, step: SearchStep) -> FactorCosts:
        if step.operator is not None:
            prices = [self.prices.computation(step.operator, rule) for rule in step.rules]
        else:
            value = self.graph.value_of[step.reads[0]]
            prices = [self.prices.move(value, rule.inputs[0], None) for rule in step.rules]

        def costs() -> FactorCosts:
            memory = np.array([price.held_bytes(self._limited) for price in prices])
            seconds = np.array([price.seconds for price in prices])
            return FactorCosts((len(prices),), np.arange(len(prices))[:, None], seconds, memory)

        key = tuple(map(id, prices)) if step.operator else step.reads
        found: FactorCosts = self._once(key, costs)
        return found

    def program(self, paid: Sequence[int], name: str) -> SpmdProgram:
        """The program that pays some costs, one of every factor.

        Conversions are made where their result is first read.
        """
        storage: dict[str, Placement] = {}
        instructions: list[Instruction] = []
        there: dict[str, set[Placement]] = {}

        def obtain(name: str, way: Obtained) -> None:
            """Begins a value where it has not begun, and makes its conversions."""
            placements, value = self.tables[name].placements, self.graph.value_of[name]
            if name not in there:
                first = way.path[0][0] if way.path else way.placements.bit_length() - 1
                there[name] = {placements[first]}
                if value.source is ValueSource.INPUT:
                    instructions.append(Move(name, None, placements[first]))
                else:
                    storage[name] = placements[first]
            for one, other in ((placements[i], placements[j]) for i, j in way.path):
                if other not in there[name]:
                    instructions.append(Move(name, one, other))
                    there[name].add(other)

        pairs = zip(self.factors, paid, strict=True)
        for number, group in groupby(pairs, key=lambda pair: pair[0].step):
            (_, which), *reads = group
            for factor, way in reads:
                obtain(factor.value, factor.costs.ways[way])
            step, rule = self.steps[number], self.steps[number].rules[which]
            if step.operator is None:
                instructions.append(Move(step.reads[0], rule.inputs[0], None))
                continue
            made = rule.inputs, rule.outputs, rule.option
            instructions.append(Computation(step.operator.name, *made))
            there |= {n: {p} for n, p in zip(step.operator.outputs, rule.outputs)}
        return SpmdProgram(self.prices.shares, storage, tuple(instructions), name)


def _reading(
    table: ValueTable, before: tuple[int, ...], wanted: tuple[tuple[int, ...], ...], is_last: bool
) -> tuple[FactorCosts, tuple[int, ...]]:
    """The costs of a read, and what may be there after it.

    Args:
        table: of the value.
        before: in which placements it may be there, a set each.
        wanted: by every rule.
        is_last: whether nothing reads it later.
    """
    found = [
        (has, rule, way)
        for has, placements in enumerate(before)
        for rule, targets in enumerate(wanted)
        for way in table.ways(placements, targets)
    ]
    sets = sorted({way.placements for *_, way in found})
    places = [(has, rule, sets.index(way.placements)) for has, rule, way in found]
    axes = slice(0 if before != (0,) else 1, 2 if is_last else 3)
    costs = FactorCosts(
        tuple([len(before), len(wanted), len(sets)][axes]),
        np.array(places, dtype=np.intp).reshape(-1, 3)[:, axes],
        np.array([way.seconds for *_, way in found]),
        np.array([way.memory_bytes for *_, way in found]),
        tuple(way for *_, way in found),
    )
    return costs, tuple(sets)
