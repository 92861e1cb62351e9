"""Where the boxes and edges of a picture of a stage graph go, in inches from the upper left corner.

Stages are in layers by depth (Sugiyama, Tagawa, Toda 1981, "Methods for visual understanding of
hierarchical system structures"): edges that skip layers get a *wire* in each layer between. Stages
are numbered branch after branch, which is the order in a layer; wires are at the right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import mean
from typing import NamedTuple

from lightning_gpp.graph import FEED, StageEdge, StageGraph

Point = tuple[float, float]
Box = tuple[float, float, float, float]
Node = int | tuple[int, int, int]
"""A stage, or a wire: source, target and layer."""

SWEEPS = 8
"""How often the columns are improved."""

GAP_IN, LAYER_GAP_IN = 0.3, 0.5


class Layout(NamedTuple):
    """Positions of boxes and edges, in inches.

    Attributes:
        boxes: left, top, width and height of each stage.
        ways: points of each edge; where two follow each other at different x it may bend.
        width_in: width of the picture.
        height_in: height of the picture.
    """

    boxes: Mapping[int, Box]
    ways: Sequence[tuple[StageEdge, Sequence[Point]]]
    width_in: float
    height_in: float


def lay_out(stages: StageGraph, sizes: Sequence[Point]) -> Layout:
    """Places the boxes and edges of a stage graph.

    Args:
        stages: the stage graph; its feed is not drawn.
        sizes: width and height of the box of each stage.
    """
    deepest = max(stages.depths.values())
    at: dict[Node, int] = {stage: deepest - depth for stage, depth in stages.depths.items()}
    chains: list[tuple[StageEdge, list[Node]]] = []
    for edge in stages.edges:
        if edge.source != FEED:
            wires = range(at[edge.source] + 1, at[edge.target])
            between = [(edge.source, edge.target, number) for number in wires]
            at |= {wire: wire[2] for wire in between}
            chains.append((edge, [edge.source, *between, edge.target]))
    near: dict[Node, list[Node]] = {node: [] for node in at}
    for upper, lower in (pair for _, chain in chains for pair in pairwise(chain)):
        near[lower].append(upper)
        near[upper].append(lower)
    layers = [[node for node in at if at[node] == number] for number in range(deepest)]
    width = {node: sizes[node][0] if isinstance(node, int) else 0.0 for node in at}
    x = _columns(layers, width, near)
    first = min(x[node] - width[node] / 2 for node in x)
    heights = [max(sizes[n][1] for n in layer if isinstance(n, int)) for layer in layers]
    tops = [*accumulate((height + LAYER_GAP_IN for height in heights), initial=0.0)]

    def box(node: Node) -> Box:
        number = at[node]
        height = sizes[node][1] if isinstance(node, int) else heights[number]
        top = tops[number] + (heights[number] - height) / 2
        return x[node] - width[node] / 2 - first, top, width[node], height

    ways = []
    for edge, chain in chains:
        ends: list[Point] = []
        for node in chain:
            left, top, wide, high = box(node)
            ends += [(left + wide / 2, top), (left + wide / 2, top + high)]
        ways.append((edge, ends[1:-1]))
    right = max(x[node] + width[node] / 2 for node in x)
    boxes = {stage: box(stage) for stage in range(stages.num_stages)}
    return Layout(boxes, ways, right - first, tops[-1] - LAYER_GAP_IN)


def _columns(
    layers: Sequence[Sequence[Node]],
    width: Mapping[Node, float],
    near: Mapping[Node, Sequence[Node]],
) -> dict[Node, float]:
    """The middle of every box and wire: as close to its neighbours as there is room."""
    x = dict.fromkeys(near, 0.0)
    for _ in range(SWEEPS):
        for layer in layers:
            gaps = [(width[a] + width[b]) / 2 + GAP_IN for a, b in pairwise(layer)]
            wanted = [mean([x[other] for other in near[node]] or [x[node]]) for node in layer]
            x.update(zip(layer, _apart(wanted, gaps)))
    return x


def _apart(wanted: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """Places in this order at least so far apart: the mean of the leftmost and the rightmost."""
    offsets = [*accumulate(gaps, initial=0.0)]
    free = [place - offset for place, offset in zip(wanted, offsets)]
    left, right = accumulate(free, max), [*accumulate(reversed(free), min)][::-1]
    return [(a + b) / 2 + offset for a, b, offset in zip(left, right, offsets)]
