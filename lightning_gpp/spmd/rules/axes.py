"""Along what the tensors of a graph may be cut, so that cuts meet.

A dimension is a product of *axes*: what every operator that it passes through sees as one piece.
The output of a linear layer of width 768 that a view later takes as 12 heads of width 64 has the
axes 12 and 64, and so have the rows of the layer's weight. Whoever deals heads deals whole heads,
everywhere: one cut per axis keeps the search small, and no cut has to be redone at the view.

The axes follow from the factors of all operators, by passing every boundary on until nothing
changes. Boundaries that do not divide each other (12 heads here, 8 there) are not joined: each
holds where it came from, and a rule is only offered where it fits all of its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.rules.factors import Dims, FactorSpec
from lightning_gpp.spmd.rules.rule import FactorCut

Chain = tuple[int, ...]
"""Products of the leading axes of a dimension, from 1 to its length."""


class Axes:
    """The axes of all dimensions of a graph.

    Args:
        graph: the model.
        specs: factors of every operator that has some, by its name.
    """

    def __init__(self, graph: SpmdGraph, specs: Mapping[str, FactorSpec]) -> None:
        self._chains: dict[tuple[str, int], Chain] = {
            (value.name, dim): (1, length) if length > 1 else (1,)
            for value in graph.values
            for dim, length in enumerate(value.shape)
        }
        tensors = [
            (spec, op.operands(spec.inputs, spec.outputs))
            for op in graph.operators
            if (spec := specs.get(op.name)) is not None
        ]
        readers: dict[str, list[int]] = {}
        for number, (_, operands) in enumerate(tensors):
            for name in dict.fromkeys(name for name, _ in operands):
                readers.setdefault(name, []).append(number)
        self._settle(tensors, readers)

    def _settle(
        self,
        tensors: Sequence[tuple[FactorSpec, Sequence[tuple[str, Dims]]]],
        readers: Mapping[str, Sequence[int]],
    ) -> None:
        waiting = dict.fromkeys(range(len(tensors)))
        while waiting:
            number = next(iter(waiting))
            del waiting[number]
            for name in self._refine(*tensors[number]):
                waiting.update(dict.fromkeys(readers[name]))

    def _refine(self, spec: FactorSpec, operands: Sequence[tuple[str, Dims]]) -> set[str]:
        """Joins the axes of one operator's tensors; returns the tensors that got new ones."""
        changed = set()
        for factor in spec.sizes:
            chain = self.chain_of(factor, spec, operands)
            for name, dims in operands:
                place = spec.places(dims).get(factor)
                if place is None:
                    continue
                dim, outer = place
                old = self._chains[name, dim]
                new = _joined(old, tuple(outer * point for point in chain))
                if new is not None and new != old:
                    self._chains[name, dim] = new
                    changed.add(name)
        return changed

    def chain_of(
        self, factor: str, spec: FactorSpec, operands: Sequence[tuple[str, Dims]]
    ) -> Chain:
        """The boundaries inside a factor, of all tensors that have it, as far as they fit."""
        size = spec.sizes[factor]
        chain: Chain = (1, size) if size > 1 else (1,)
        for name, dims in operands:
            place = spec.places(dims).get(factor)
            if place is None:
                continue
            dim, outer = place
            inner = tuple(
                point // outer
                for point in self._chains[name, dim]
                if point % outer == 0 and size % (point // outer) == 0
            )
            chain = _joined(chain, inner) or chain
        return chain

    def cuts(
        self, spec: FactorSpec, operands: Sequence[tuple[str, Dims]], least_units: int
    ) -> tuple[FactorCut, ...]:
        """The ways to deal an operator's factors.

        Args:
            spec: the operator's factors.
            operands: its tensors, by name.
            least_units: what a cut has to have, so that no device is left without.
        """
        return tuple(
            FactorCut(factor, start, end // start)
            for factor in spec.sizes
            for chain in [self.chain_of(factor, spec, operands)]
            for start, end in zip(chain, chain[1:])
            if end // start >= least_units
        )

    def cuts_of(self, name: str, least_units: int) -> tuple[tuple[int, int, int], ...]:
        """The cuts of a tensor: dimension, outer, units."""
        return tuple(
            (dim, start, end // start)
            for (_, dim), chain in self._by_value(name)
            for start, end in zip(chain, chain[1:])
            if end // start >= least_units
        )

    def _by_value(self, name: str) -> list[tuple[tuple[str, int], Chain]]:
        found, dim = [], 0
        while (name, dim) in self._chains:
            found.append(((name, dim), self._chains[name, dim]))
            dim += 1
        return found


def _joined(one: Chain, other: Chain) -> Chain | None:
    """All boundaries of both, where each divides the next; else None.

    >>> _joined((1, 12), (1, 3, 12)), _joined((1, 4, 12), (1, 3, 12))
    ((1, 3, 12), None)
    """
    points = tuple(sorted({*one, *other}))
    if all(after % before == 0 for before, after in zip(points, points[1:])):
        return points
    return None
