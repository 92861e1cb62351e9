"""Along what the tensors of a graph may be cut, so that cuts meet.

A dimension is a product of *axes*: what every operator that it passes through sees as one piece.
The output of a linear layer of width 768 that a view later takes as 12 heads of width 64 has the
axes 12 and 64, and so have the rows of the layer's weight. Heads are divided between heads and
everywhere alike: one cut per axis keeps the search small, and no cut has to be redone at the view.

The axes follow from the factors of all operators, by passing every boundary on until nothing
changes. Boundaries that do not divide each other (12 heads here, 8 there) are not joined: each
holds where it came from, and a rule is only offered where it fits all of its tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from lightning_gpp.spmd.operator_graph import SpmdGraph, SpmdOperator
from lightning_gpp.spmd.rules.factors import FactorCut, FactorSpec

Chain = tuple[int, ...]
"""Products of the leading axes of a dimension, from 1 to its length."""


class Axes:
    """The axes of all dimensions of a graph.

    Args:
        graph: the model.
        specs: factors of every operator that has some, by its name.
    """

    def __init__(self, graph: SpmdGraph, specs: Mapping[str, FactorSpec]) -> None:
        self._specs = specs
        self._chains: dict[str, list[Chain]] = {
            value.name: [_undivided(length) for length in value.shape] for value in graph.values
        }
        readers: defaultdict[str, dict[str, None]] = defaultdict(dict)
        for name in specs:
            operator = graph.operator_of[name]
            for tensor in (*operator.inputs, *operator.outputs):
                readers[tensor][name] = None
        waiting = dict.fromkeys(specs)
        while waiting:
            name = next(iter(waiting))
            del waiting[name]
            for tensor in self._refine(graph.operator_of[name]):
                waiting |= readers[tensor]

    def _refine(self, operator: SpmdOperator) -> set[str]:
        """Joins the axes of one operator's tensors; returns the tensors that got new ones."""
        changed = set()
        for factor in self._specs[operator.name].sizes:
            chain = self._chain(factor, operator)
            for name, dim, outer in self._places(factor, operator):
                old = self._chains[name][dim]
                new = _joined(old, tuple(outer * point for point in chain))
                if new is not None and new != old:
                    self._chains[name][dim] = new
                    changed.add(name)
        return changed

    def _places(self, factor: str, operator: SpmdOperator) -> Iterator[tuple[str, int, int]]:
        """Tensors that have a factor, with its dimension and what is before it there."""
        spec = self._specs[operator.name]
        for name, dims in operator.operands(spec.inputs, spec.outputs):
            if place := spec.place(factor, dims):
                yield name, *place

    def _chain(self, factor: str, operator: SpmdOperator) -> Chain:
        """The boundaries inside a factor, of all tensors that have it, as far as they fit."""
        size = self._specs[operator.name].sizes[factor]
        chain = _undivided(size)
        for name, dim, outer in self._places(factor, operator):
            inner = tuple(
                point // outer
                for point in self._chains[name][dim]
                if point % outer == 0 and size % (point // outer) == 0
            )
            chain = _joined(chain, inner) or chain
        return chain

    def cuts(self, operator: SpmdOperator, least_units: int) -> Iterator[FactorCut]:
        """Ways to divide an operator's factors, with so many units that each device has some."""
        for factor in self._specs[operator.name].sizes:
            for outer, units in _steps(self._chain(factor, operator), least_units):
                yield FactorCut(factor, outer, units)

    def cuts_of(self, name: str, least_units: int) -> Iterator[tuple[int, int, int]]:
        """The cuts of a tensor: dimension, outer, units."""
        for dim, chain in enumerate(self._chains[name]):
            for outer, units in _steps(chain, least_units):
                yield dim, outer, units


def _undivided(length: int) -> Chain:
    return (1, length) if length > 1 else (1,)


def _steps(chain: Chain, least_units: int) -> Iterator[tuple[int, int]]:
    for start, end in zip(chain, chain[1:]):
        if end // start >= least_units:
            yield start, end // start


def _joined(one: Chain, other: Chain) -> Chain | None:
    """All boundaries of both, where each divides the next; else None.

    >>> _joined((1, 12), (1, 3, 12)), _joined((1, 4, 12), (1, 3, 12))
    ((1, 3, 12), None)
    """
    points = tuple(sorted({*one, *other}))
    divide = all(after % before == 0 for before, after in zip(points, points[1:]))
    return points if divide else None
