"""Graph parallelism as data: a model whose vertices are divided over several *ways*.

Every way holds a part of the vertices of one graph and runs all operators on them. Before messages
are passed, a way needs the rows of some vertices of others, its *mirrors*. So each way is a branch
of the model, the operators of branches share their parameters, and rows for mirrors are values that
lead from one branch to another:

.. code-block:: text

    way0.lin ──▶ way0.conv ──▶ join      way0.lin also makes way0.h>1: rows for mirrors on way 1
           ╲  ╱               ╱
           ╱  ╲              ╱
    way1.lin ──▶ way1.conv ─╯

What plans, schedules, simulates and runs branches knows nothing else of graph parallelism.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_gpp.graph.model_graph import ModelGraph, OpNode, Value, Variation


@dataclass(frozen=True, slots=True)
class VertexShares:
    """How many vertices each way has, and how many rows ways exchange.

    Attributes:
        rows: number of vertices of every way.
        mirrors: (way, reader) -> vertices of a way whose rows another one reads.
    """

    rows: Sequence[int]
    mirrors: Mapping[tuple[int, int], int]

    @property
    def num_ways(self) -> int:
        """Number of ways."""
        return len(self.rows)

    def readers(self, way: int) -> list[int]:
        """The ways that read rows of a way."""
        return [
            other for other in range(self.num_ways) if other != way and self.mirrors[way, other]
        ]


class WayValue(NamedTuple):
    """Where a value of a model in ways comes from.

    Attributes:
        name: of the value in the model.
        way: whose rows it has.
        reader: for whose mirrors it is; None if it has all rows of its way.
    """

    name: str
    way: int = 0
    reader: int | None = None


@dataclass(frozen=True, slots=True)
class WaysGraph:
    """A model in ways: one copy of every operator per way.

    Attributes:
        graph: with an operator per way, and one per output that joins what the ways made.
        values: name in it -> what it is; inputs and joined outputs are not in it.
        operators: name in it -> (operator of the model, way); those that join are not in it.
        num_ways: how many ways there are.
    """

    graph: ModelGraph
    values: Mapping[str, WayValue]
    operators: Mapping[str, tuple[str, int]]
    num_ways: int = 1

    @classmethod
    def of_one(cls, graph: ModelGraph) -> WaysGraph:
        """One way, which is the model itself."""
        values = {value.name: WayValue(value.name) for op in graph for value in op.outputs}
        return cls(graph, values, {operator.name: (operator.name, 0) for operator in graph})

    def first_way(self) -> ModelGraph:
        """The branch of way 0 without what it gets of others."""
        operators = [
            replace(operator, inputs=tuple(filter(self._is_own, operator.inputs)))
            for operator in self.graph
            if self.operators.get(operator.name, ("", None))[1] == 0
        ]
        joins = [operator for operator in self.graph if operator.name not in self.operators]
        outputs = [join.inputs[0] for join in joins]
        outputs += [name for name in self.graph.outputs if name not in self.graph.producer]
        return replace(self.graph, operators=tuple(operators), outputs=tuple(outputs))

    def _is_own(self, name: str) -> bool:
        return name not in self.values or self.values[name][1:] == (0, None)

    def exchanges(self, operator: OpNode) -> bool:
        """Whether an operator reads rows of other ways, so that it waits for their branches."""
        return any(
            name in self.values and self.values[name].reader is not None for name in operator.inputs
        )


def in_ways(
    graph: ModelGraph, shares: VertexShares, exchanged: Collection[tuple[str, str]]
) -> WaysGraph:
    """A model in ways.

    Args:
        graph: the model, in which vertices are samples and all inputs stay on the stages, which cut
            them by themselves.
        shares: of the ways.
        exchanged: (operator, value) that is read along edges.

    >>> from lightning_gpp.graph import TensorSpec
    >>> rows = Value("h", (TensorSpec((6, 2), "float32", batch_dim=0),))
    >>> ops = OpNode("lin", "lin", "lin", (), (rows,)), OpNode("conv", "conv", "conv", ("h",), ())
    >>> shares = VertexShares((4, 2), {(0, 1): 3, (1, 0): 0})
    >>> found = in_ways(ModelGraph((), ops, ()), shares, {("conv", "h")}).graph
    >>> [(op.name, op.inputs, [(v.name, v.tensors[0].shape) for v in op.outputs]) for op in found]
    ... # doctest: +NORMALIZE_WHITESPACE
    [('way0.lin', (), [('way0.h', (4, 2)), ('way0.h>1', (3, 2))]),
     ('way1.lin', (), [('way1.h', (2, 2))]),
     ('way0.conv', ('way0.h',), []),
     ('way1.conv', ('way1.h', 'way0.h>1'), [])]
    """
    if shares.num_ways == 1:
        return WaysGraph.of_one(graph)
    ways = range(shares.num_ways)
    is_read = {name for _, name in exchanged}
    values: dict[str, WayValue] = {}
    origins: dict[str, tuple[str, int]] = {}
    operators: list[OpNode] = []
    for operator in graph:
        for way in ways:
            outputs = []
            for value in operator.outputs:
                readers = shares.readers(way) if value.name in is_read else []
                for reader in (None, *readers):
                    what = WayValue(value.name, way, reader)
                    values[name_of(what)] = what
                    outputs.append(_value(value, what, shares))
            inputs = [
                name
                for value in operator.inputs
                for name in _read(graph, shares, (operator.name, value) in exchanged, value, way)
            ]
            name, scope = _of_way(way, operator.name), _of_way(way, operator.scope)
            origins[name] = operator.name, way
            operators.append(
                replace(
                    operator, name=name, scope=scope, inputs=tuple(inputs), outputs=tuple(outputs)
                )
            )
    operators += [_join(graph, name, shares) for name in graph.outputs if name in graph.producer]
    return WaysGraph(replace(graph, operators=tuple(operators)), values, origins, shares.num_ways)


def name_of(value: WayValue) -> str:
    """The name of a value in a graph of several ways."""
    mirrored = "" if value.reader is None else f">{value.reader}"
    return f"{_of_way(value.way, value.name)}{mirrored}"


def _of_way(way: int, name: str) -> str:
    return f"way{way}.{name}"


def _read(
    graph: ModelGraph, shares: VertexShares, is_exchanged: bool, name: str, way: int
) -> list[str]:
    """What an operator of a way reads in the place of a value of the model."""
    if name not in graph.producer:
        return [name]
    read = [name_of(WayValue(name, way))]
    if is_exchanged:
        others = [other for other in range(shares.num_ways) if way in shares.readers(other)]
        read += [name_of(WayValue(name, other, way)) for other in others]
    return read


def _value(value: Value, what: WayValue, shares: VertexShares) -> Value:
    """A value with the rows of a way, or of its mirrors."""
    if value.variation is not Variation.SAMPLES:
        return replace(value, name=name_of(what))
    reader = what.reader
    count = shares.rows[what.way] if reader is None else shares.mirrors[what.way, reader]
    tensors = tuple(replace(spec, shape=(count, *spec.shape[1:])) for spec in value.tensors)
    return replace(value, name=name_of(what), tensors=tensors)


def _join(graph: ModelGraph, name: str, shares: VertexShares) -> OpNode:
    """What makes an output of the model of the ways'."""
    value = graph.values[name]
    count = shares.num_ways if value.variation is Variation.SAMPLES else 1
    inputs = tuple(name_of(WayValue(name, way)) for way in range(count))
    return OpNode(f"join.{name}", "torch.cat", "", inputs, (value,))
