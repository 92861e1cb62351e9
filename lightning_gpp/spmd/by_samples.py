"""Data parallelism as an SPMD program: samples are dealt by shares, operators follow.

Every operator takes the rule that needs the fewest bytes from others: what is sharded along the
samples stays so, parameters are read where they are stored. It is no search, and what no rule can
do with samples apart (statistics of the whole batch) is gathered and done everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator, ValueSource
from lightning_gpp.spmd.placement import PARTIAL, R_SAME, R_SUMMED, Placement
from lightning_gpp.spmd.program import (
    Computation,
    Conversion,
    Instruction,
    Method,
    Option,
    ReceiveInput,
    ReturnOutput,
    SpmdProgram,
    methods,
)
from lightning_gpp.spmd.rules.rule import Rule
from lightning_gpp.spmd.rules.theory import Theory


def by_samples(
    graph: SpmdGraph,
    shares: Sequence[float],
    storage: Mapping[str, Placement] | None = None,
) -> SpmdProgram:
    """A data-parallel program.

    Args:
        graph: the model.
        shares: part of the samples of every device.
        storage: how parameters and buffers are stored already; whole where nothing is said.
    """
    writer = _Writer(graph, tuple(shares), dict(storage or {}))
    return writer.program()


class _Writer:
    """Writes the program, operator by operator."""

    def __init__(
        self, graph: SpmdGraph, shares: tuple[float, ...], storage: dict[str, Placement]
    ) -> None:
        self._graph, self._shares, self._storage = graph, shares, storage
        self._theory = Theory(graph, len(shares))
        self._there: dict[str, list[Placement]] = {}
        self._instructions: list[Instruction] = []

    def program(self) -> SpmdProgram:
        """The whole program."""
        self._begin()
        for operator in self._graph.operators:
            self._compute(operator)
        for name in dict.fromkeys(self._graph.outputs):
            placement = self._there[name][0]
            is_whole = placement.is_replicated
            method = Method.NONE if is_whole else Method.DIRECT
            self._instructions.append(ReturnOutput(name, placement, method))
        return SpmdProgram(
            (self._shares,), self._storage, tuple(self._instructions), "data parallel"
        )

    def _begin(self) -> None:
        inputs = self._graph.of_source(ValueSource.INPUT)
        num_samples = Counter(v.shape[0] for v in inputs if v.shape).most_common(1)
        for value in self._graph.values:
            if value.source is ValueSource.OPERATOR:
                continue
            placement = self._storage.setdefault(value.name, R_SAME)
            if value.source is ValueSource.INPUT:
                del self._storage[value.name]
                has_samples = bool(value.shape) and value.shape[0] == num_samples[0][0]
                placement = self._along_samples(value.name) if has_samples else R_SAME
                self._instructions.append(ReceiveInput(value.name, placement))
            self._there[value.name] = [placement]

    def _along_samples(self, name: str) -> Placement:
        found = [p for p in self._theory.shards(name) if p.dim == 0 and p.outer == 1]
        return found[0] if found else R_SAME

    def _compute(self, operator: SpmdOperator) -> None:
        rules = [
            rule
            for rule in self._theory.rules(operator)
            if rule.option is not Option.SUFFICIENT_FACTORS
        ]
        rule = min(rules, key=lambda rule: self._cost(operator, rule))
        for name, placement in zip(operator.inputs, rule.inputs, strict=True):
            if placement not in self._there[name]:
                self._convert(name, placement)
        self._instructions.append(
            Computation(operator.name, rule.inputs, rule.outputs, rule.option, note=rule.note)
        )
        for name, placement in zip(operator.outputs, rule.outputs, strict=True):
            self._there[name] = [placement]

    def _cost(self, operator: SpmdOperator, rule: Rule) -> tuple[float, int]:
        """Bytes that move for it, and what every device does all of; then the order of rules."""
        values = self._graph.value_of
        moved = 0.0
        for name, placement in zip(operator.inputs, rule.inputs, strict=True):
            there, value = self._there[name], values[name]
            is_given = value.source in (ValueSource.PARAMETER, ValueSource.BUFFER)
            if placement in there or is_given:
                continue
            moved += min(_share_moved(one, placement) for one in there) * value.size_bytes
        is_whole = all(p.is_replicated for p in rule.outputs)
        is_sum = any(p == PARTIAL for p in rule.outputs)
        made = sum(values[name].size_bytes for name in operator.outputs)
        wants_parts = any(
            p.is_shard and values[name].source in (ValueSource.PARAMETER, ValueSource.BUFFER)
            for name, p in zip(operator.inputs, rule.inputs, strict=True)
        )
        return moved + made * (is_whole + is_sum + wants_parts), is_whole

    def _convert(self, name: str, placement: Placement) -> None:
        there = self._there[name]
        source = min(there, key=lambda one: _share_moved(one, placement))
        forward, *_ = methods(source, placement)
        backward = Method.NONE
        if self._graph.value_of[name].requires_grad:
            backward, *_ = methods(placement.dual, source.dual)
        self._instructions.append(Conversion(name, source, placement, forward, backward))
        there.append(placement)


def _share_moved(source: Placement, target: Placement) -> float:
    """How much of a tensor moves, forwards and backwards, about."""
    if source == target:
        return 0.0
    if source.is_replicated and target.is_replicated:
        return 1.0 if target == R_SUMMED else 0.0
    if source.is_replicated:
        return 1.0 if source == R_SAME and target.is_shard else 0.1
    return 2.0
