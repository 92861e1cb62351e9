"""The parameters of units in the order of their places, and what stages of them keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner.graphpipe.space.crew import Interval
from lightning_gpp.planner.units.units import UnitGraph


class Holdings:
    """Parameters, of which several units may share some.

    Attributes:
        parameters: the parameters of the unit at every place.
        gradient_bytes: running sums over the places of the bytes of gradients, of parameters that
            no earlier place has.
    """

    def __init__(self, graph: ModelGraph, units: UnitGraph, order: Sequence[int]) -> None:
        self._graph = graph
        self.parameters = [
            frozenset(n for name in units.operators[u] for n in graph.operator[name].parameters)
            for u in order
        ]
        holders = Counter(name for names in self.parameters for name in names)
        shared = [frozenset(n for n in names if holders[n] > 1) for names in self.parameters]
        own = [self._bytes(names - more) for names, more in zip(self.parameters, shared)]
        self._shared = shared
        self._own_bytes = [*accumulate((size for size, _ in own), initial=0)]
        self._own_trained_bytes = [*accumulate((trained for _, trained in own), initial=0)]
        self.gradient_bytes = self._running_gradient_bytes()

    def _running_gradient_bytes(self) -> list[int]:
        known: set[str] = set()
        sums = [0]
        for names in self.parameters:
            sums.append(sums[-1] + self._bytes(names - known)[1])
            known |= names
        return sums

    def _bytes(self, names: Iterable[str]) -> tuple[int, int]:
        """Bytes of parameters, and of those that are trained."""
        parameters = [self._graph.parameter[name] for name in names]
        trained = (p.size_bytes for p in parameters if p.requires_grad)
        return sum(p.size_bytes for p in parameters), sum(trained)

    def bytes_of(self, interval: Interval) -> tuple[int, int]:
        """Bytes of the parameters of a stage, and of those that are trained, each counted once."""
        start, stop = interval
        total = self._own_bytes[stop] - self._own_bytes[start]
        trained = self._own_trained_bytes[stop] - self._own_trained_bytes[start]
        if shared := set().union(*self._shared[start:stop]):
            more, more_trained = self._bytes(shared)
            return total + more, trained + more_trained
        return total, trained
