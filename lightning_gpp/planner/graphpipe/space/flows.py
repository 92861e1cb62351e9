"""The values that go from unit to unit, or come from the feed."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpp.graph import FEED, ModelGraph
from lightning_gpp.planner.edge_bytes import EdgeBytes, edge_bytes
from lightning_gpp.planner.units.units import UnitGraph


@dataclass(frozen=True, slots=True)
class UnitFlow:
    """A value between units: who makes it, who reads it, its bytes, whether it can be cut."""

    source: int
    targets: tuple[int, ...]
    size: EdgeBytes
    is_cuttable: bool = True


def unit_flows(graph: ModelGraph, units: UnitGraph) -> tuple[UnitFlow, ...]:
    """The values that leave a unit or come from the feed."""
    unit_of = {name: unit for unit, names in enumerate(units.operators) for name in names}
    readers: dict[str, set[int]] = {}
    for operator in graph:
        for name in operator.inputs:
            readers.setdefault(name, set()).add(unit_of[operator.name])
    needs_grad = {item.value.name for item in graph.inputs if item.requires_grad}
    flows = []
    for name, targets in readers.items():
        source = unit_of[graph.producer[name]] if name in graph.producer else FEED
        others = tuple(sorted(targets - {source}))
        if others:
            has_backward = source != FEED or name in needs_grad
            size = edge_bytes(graph, (name,), has_backward=has_backward)
            flows.append(UnitFlow(source, others, size, graph.values[name].is_cuttable))
    return tuple(flows)
