"""Lets one stage of a device receive a value for all stages of the device that read it.

.. code-block:: text

    0 ──h──▶ 1 ──▶ 2        0 ──h──▶ 1 ──h──▶ 2      stages 1 and 2 are on one device
    └────h───────▶ ┘

A message less, and nobody waits longer, as the second stage waits for the first one anyway.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from lightning_gpp.graph.model_graph import ModelGraph
from lightning_gpp.graph.stage_graph import StageEdge, StageGraph


def relayed(stages: StageGraph, graph: ModelGraph, homes: Sequence[Hashable]) -> StageGraph:
    """The stage graph in which stages of one device hand values on.

    Args:
        stages: each takes its values where they are made.
        graph: the model.
        homes: of every stage; what is equal is the same devices with the same shares.

    >>> from lightning_gpp.graph import OpNode, Value, stage_graph
    >>> h, y = (Value(name, ()) for name in "hy")
    >>> ops = OpNode("a", "", "", (), (h,)), OpNode("b", "", "", ("h",), (y,))
    >>> graph = ModelGraph((), (*ops, OpNode("c", "", "", ("h", "y"), ())), ())
    >>> stages = stage_graph(graph, [["a"], ["b"], ["c"]])
    >>> [(e.source, e.target, e.values) for e in relayed(stages, graph, [0, 1, 1]).edges]
    [(0, 1, ('h',)), (1, 2, ('y', 'h'))]
    """
    if len(set(homes)) == stages.num_stages:
        return stages
    carried = {(edge.source, edge.target): dict.fromkeys(edge.values) for edge in stages.edges}
    above = _above(stages)
    holders: dict[tuple[str, Hashable], list[int]] = {}
    for edge in sorted(stages.edges, key=lambda edge: edge.target):
        home = homes[edge.target]
        if homes[edge.source] == home:  # of the feed: that of the last stage
            continue
        for name in edge.values:
            known = holders.setdefault((name, home), [])
            near = next((s for s in reversed(known) if above[edge.target] >> s & 1), None)
            if near is not None:
                del carried[edge.source, edge.target][name]
                carried.setdefault((near, edge.target), {})[name] = None
            known.append(edge.target)
    edges = (
        StageEdge.of(graph, *pair, values)
        for pair, values in sorted(carried.items())
        if values or not stages.edge[pair].values
    )
    return replace(stages, edges=tuple(edges))


def _above(stages: StageGraph) -> list[int]:
    """For every stage those that it waits for, as bits."""
    found = [0] * stages.num_stages
    for target in range(stages.num_stages):
        for source in stages.predecessors[target]:
            found[target] |= found[source] | 1 << source
    return found
