"""A graph as steps of a search: what each reads and makes, by which rules, at what price.

A step is an operator, or the return of an output. Values that one step alone reads and nothing
makes (most parameters) are priced into that step's rules once and for all; the others are *live*.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_gpp.spmd.costs.prices import PriceList, is_given
from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator, SpmdValue, ValueSource
from lightning_gpp.spmd.placement import R_SAME, Placement
from lightning_gpp.spmd.rules.rule import Rule
from lightning_gpp.spmd.rules.theory import Theory
from lightning_gpp.spmd.search.limits import Allowed
from lightning_gpp.spmd.search.value_table import Memory, Obtained, ValueTable, plus


@dataclass(frozen=True, slots=True)
class Begun:
    """A parameter, buffer or input that one step alone reads, by one of its rules.

    Attributes:
        value: its name.
        way: from where it begins to what the rule reads.
    """

    value: str
    way: Obtained


@dataclass(frozen=True, slots=True)
class PricedRule:
    """A rule of a step with the price of all that depends on nothing else.

    Attributes:
        rule: the rule; of a return, one input and no output.
        seconds: of the computation, and of values that only this step reads.
        memory: bytes that these leave.
        reads: live values to have, each with the place of its placement in its table.
        makes: bit of each output's placement.
        begun: the values that only this step reads.
    """

    rule: Rule
    seconds: float
    memory: Memory
    reads: tuple[tuple[str, int], ...]
    makes: tuple[int, ...]
    begun: tuple[Begun, ...]


@dataclass(frozen=True, slots=True)
class SearchStep:
    """One step.

    Attributes:
        operator: the operator; None for a return.
        value: the value that is returned; None for an operator.
        rules: what may be done.
        live: values that are live before it, in order.
        live_after: values that are live after it.
        outputs: names of the values that it makes and somebody reads.
    """

    operator: SpmdOperator | None
    value: str | None
    rules: tuple[PricedRule, ...]
    live: tuple[str, ...]
    live_after: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def least_s(self) -> float:
        """Seconds that it takes at least, whatever is there before."""
        return min(rule.seconds for rule in self.rules)

    @property
    def least_memory(self) -> Memory:
        """Bytes that it leaves at least, per class of devices."""
        return tuple(map(min, zip(*(rule.memory for rule in self.rules))))


class StepBuilder:
    """Builds the steps of a graph.

    Args:
        theory: what may be done.
        prices: what it costs.
        allowed: what the search is limited to.
        classes: devices to count the memory of.
    """

    def __init__(
        self,
        theory: Theory,
        prices: PriceList,
        allowed: Allowed,
        classes: tuple[int, ...] = (),
    ) -> None:
        self._theory = theory
        self._graph: SpmdGraph = theory.graph
        self._prices = prices
        self._allowed = allowed
        self._classes = classes
        self._twice = {
            name for op in self._graph.operators for name in op.inputs if op.inputs.count(name) > 1
        }
        self._rules = {op.name: self._rules_of(op) for op in self._graph.operators}
        self._tables_by_key: dict[tuple[object, ...], ValueTable] = {}
        self._placements = self._all_placements()
        self.tables = {value.name: self._table(value) for value in self._graph.values}

    def _rules_of(self, operator: SpmdOperator) -> tuple[Rule, ...]:
        found = self._theory.rules(operator)
        return tuple(rule for rule in found if self._allowed.rule(operator, rule)) or found[:2]

    def _all_placements(self) -> dict[str, tuple[Placement, ...]]:
        """Of every value those that a rule reads or makes, and all that conversions may pass."""
        found: dict[str, dict[Placement, None]] = {
            value.name: dict.fromkeys(self._theory.placements(value.name))
            for value in self._graph.values
        }
        for operator in self._graph.operators:
            for rule in self._rules[operator.name]:
                for name, placement in zip(operator.inputs, rule.inputs):
                    found[name][placement] = None
                for name, placement in zip(operator.outputs, rule.outputs):
                    found[name][placement] = None
        for value in self._graph.values:
            if value.source is ValueSource.PARAMETER:
                found[value.name].update(dict.fromkeys(self._storages(value)))
        return {name: tuple(placements) for name, placements in found.items()}

    def _storages(self, value: SpmdValue) -> Iterable[Placement]:
        if value.source is ValueSource.BUFFER:
            return (R_SAME,)
        shards = self._theory.shards(value.name) if value.requires_grad else ()
        return self._allowed.storages(value, (R_SAME, *shards))

    def _table(self, value: SpmdValue) -> ValueTable:
        placements = self._placements[value.name]
        key = (
            value.spec.size_bytes,
            value.requires_grad,
            value.source,
            placements,
            tuple(self._storages(value)) if value.source is ValueSource.PARAMETER else (),
        )
        if key not in self._tables_by_key:
            self._tables_by_key[key] = ValueTable(
                value,
                placements,
                self._prices,
                self._classes,
                self._beginnings(value, placements),
                self._allowed.conversion,
            )
        return self._tables_by_key[key]

    def _beginnings(
        self, value: SpmdValue, placements: tuple[Placement, ...]
    ) -> tuple[Obtained, ...]:
        if not is_given(value):
            return ()
        if value.source is ValueSource.INPUT:
            every = [p for p in placements if str(p) != "P"]
            priced = [(p, self._prices.received(value, p)) for p in every]
        else:
            priced = [(p, self._prices.stored(value, p)) for p in self._storages(value)]
        return tuple(
            Obtained(
                price.seconds,
                tuple(float(price.memory_bytes[device]) for device in self._classes),
                1 << placements.index(placement),
            )
            for placement, price in priced
        )

    def steps(self) -> tuple[SearchStep, ...]:
        """All steps, in order."""
        every: list[tuple[SpmdOperator | None, str | None]] = []
        returned = dict.fromkeys(self._graph.outputs)
        for name in [name for name in returned if is_given(self._graph.value_of[name])]:
            every.append((None, name))
            del returned[name]
        for operator in self._graph.operators:
            every.append((operator, None))
            every += [(None, name) for name in operator.outputs if name in returned]
        last = self._last_readers(every)
        first = {
            name
            for name, readers in self._readers(every).items()
            if is_given(self._graph.value_of[name]) and (len(readers) > 1 or name in self._twice)
        }
        steps, live = [], tuple(v.name for v in self._graph.values if v.name in first)
        for number, (step_operator, returned_value) in enumerate(every):
            outputs = tuple(o for o in step_operator.outputs if o in last) if step_operator else ()
            after = tuple(v for v in (*live, *outputs) if last[v] > number)
            steps.append(
                SearchStep(
                    step_operator,
                    returned_value,
                    self._priced(step_operator, returned_value, set(live), outputs),
                    live,
                    after,
                    outputs,
                )
            )
            live = after
        return tuple(steps)

    def _readers(
        self, every: Sequence[tuple[SpmdOperator | None, str | None]]
    ) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for number, (operator, name) in enumerate(every):
            names = dict.fromkeys(operator.inputs) if operator else {name or "": None}
            for each in names:
                found.setdefault(each, []).append(number)
        return found

    def _last_readers(
        self, every: Sequence[tuple[SpmdOperator | None, str | None]]
    ) -> dict[str, int]:
        return {name: readers[-1] for name, readers in self._readers(every).items()}

    def _priced(
        self,
        operator: SpmdOperator | None,
        name: str | None,
        live: set[str],
        outputs: tuple[str, ...],
    ) -> tuple[PricedRule, ...]:
        if operator is None:
            assert name is not None
            return tuple(self._returns(name, live))
        found = []
        for rule in self._rules[operator.name]:
            price = self._prices.computation(operator, rule)
            memory = tuple(float(price.memory_bytes[device]) for device in self._classes)
            wanted = dict.fromkeys(zip(operator.inputs, rule.inputs))
            makes = tuple(
                1 << self.tables[o].placements.index(placement)
                for o, placement in zip(operator.outputs, rule.outputs)
                if o in outputs
            )
            found += self._with_begun(rule, price.seconds, memory, list(wanted), live, makes)
        return _cheapest(found) if not self._classes else tuple(found)

    def _returns(self, name: str, live: set[str]) -> Iterable[PricedRule]:
        value = self._graph.value_of[name]
        for placement in self.tables[name].placements:
            price = self._prices.given(value, placement)
            memory = (0.0,) * len(self._classes)
            rule = Rule((placement,), (), note="returned")
            yield from self._with_begun(rule, price.seconds, memory, [(name, placement)], live, ())

    def _with_begun(
        self,
        rule: Rule,
        seconds: float,
        memory: Memory,
        wanted: list[tuple[str, Placement]],
        live: set[str],
        makes: tuple[int, ...],
    ) -> list[PricedRule]:
        """A rule with every way to have the values that this step alone reads."""
        partial: list[tuple[float, Memory, tuple[Begun, ...]]] = [(seconds, memory, ())]
        reads = []
        for name, placement in wanted:
            table = self.tables[name]
            place = table.placements.index(placement)
            if name in live:
                reads.append((name, place))
                continue
            ways = table.ways(0, place, True)
            partial = [
                (s + way.seconds, plus(m, way.memory), (*begun, Begun(name, way)))
                for s, m, begun in partial
                for way in ways
            ]
        return [PricedRule(rule, s, m, tuple(reads), makes, begun) for s, m, begun in partial]


def _cheapest(rules: list[PricedRule]) -> tuple[PricedRule, ...]:
    """Of rules that read and make the same, the cheapest."""
    best: dict[tuple[object, ...], PricedRule] = {}
    for rule in rules:
        key = (rule.reads, rule.makes)
        if key not in best or rule.seconds < best[key].seconds:
            best[key] = rule
    return tuple(best.values())
