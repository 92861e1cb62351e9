"""Where the boxes and edges of a picture of a stage graph go, in inches from the upper left corner.

Stages are in layers by depth (Sugiyama, Tagawa, Toda 1981, "Methods for visual understanding of
hierarchical system structures"): edges that skip layers get a *wire* in each layer between, the
order in a layer is that of the barycentres. A graph that is much deeper than wide is folded: its
layers go down in the first band, and go on at the top of the band to the right of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import mean

from lightning_gpp.graph import FEED, StageEdge, StageGraph

Point = tuple[float, float]
Box = tuple[float, float, float, float]
Node = int | tuple[int, int, int]
"""A stage, or a wire: source, target and layer."""

Neighbours = Mapping[Node, Sequence[Node]]

SWEEPS = 8
"""How often the order in the layers is improved, down and up, and then the columns."""

GAP_IN, LAYER_GAP_IN, GUTTER_IN = 0.15, 0.42, 0.12
OUT_IN, IN_IN = 1.0, 0.2
"""Between edges that leave a box, beside which something is written, and those that reach one."""

HIGHEST = 1.5
"""Bands are added while the picture is higher than this many times its width."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Places.

    Attributes:
        boxes: left, top, width and height of each stage.
        ways: corners of each edge between one layer and the next; two where it may bend.
        width_in: of all.
        height_in: of all.
    """

    boxes: Mapping[int, Box]
    ways: Sequence[tuple[StageEdge, Sequence[Sequence[Point]]]]
    width_in: float
    height_in: float


def lay_out(stages: StageGraph, sizes: Sequence[Point]) -> Layout:
    """Places the boxes and edges of a stage graph.

    Args:
        stages: the stage graph; its feed is not drawn.
        sizes: least width, and height, of the box of each stage.
    """
    layers, chains = _layers(stages)
    above: dict[Node, list[Node]] = {node: [] for layer in layers for node in layer}
    below: dict[Node, list[Node]] = {node: [] for node in above}
    segments = [segment for _, chain in chains for segment in pairwise(chain)]
    for upper, lower in segments:
        above[lower].append(upper)
        below[upper].append(lower)
    _order(layers, above, below)
    width: dict[Node, float] = dict.fromkeys(above, 0.0)
    for stage, (least_in, _) in enumerate(sizes):
        ports_in = max(OUT_IN * len(below[stage]), IN_IN * (len(above[stage]) + 1))
        width[stage] = max(least_in, ports_in)
    x = _columns(layers, width, above, below)
    start, end = _ports(x, width, above, below)

    heights = [max(sizes[n][1] for n in layer if isinstance(n, int)) for layer in layers]
    first = min(x[node] - width[node] / 2 for node in x)
    band_in = max(x[node] + width[node] / 2 for node in x) - first + OUT_IN / 2
    num_bands = 1
    while sum(heights) + LAYER_GAP_IN * len(heights) > HIGHEST * num_bands**2 * band_in:
        num_bands += 1
    per_band = -(-len(layers) // num_bands)
    at = {node: number for number, layer in enumerate(layers) for node in layer}
    band = {node: number // per_band for node, number in at.items()}
    folded = [(upper, lower) for upper, lower in segments if band[upper] < band[lower]]
    folded.sort(key=lambda segment: -start[segment])  # the outermost on the left stays outermost
    ranks = {one: [f for f in folded if band[f[0]] == band[one[0]]].index(one) for one in folded}
    gutter_in = GUTTER_IN * (2 + max(ranks.values())) if ranks else 0.0
    pitch_in = band_in + gutter_in
    tops: list[float] = []
    for number in range(len(layers)):
        goes_on = number % per_band > 0
        tops.append(tops[-1] + heights[number - 1] + LAYER_GAP_IN if goes_on else gutter_in)

    def size_of(node: Node) -> float:
        return sizes[node][1] if isinstance(node, int) else heights[at[node]]

    def top(node: Node) -> float:
        return tops[at[node]] + (heights[at[node]] - size_of(node)) / 2

    def way(upper: Node, lower: Node) -> list[Point]:
        begin = start[upper, lower] - first + pitch_in * band[upper], top(upper) + size_of(upper)
        finish = end[upper, lower] - first + pitch_in * band[lower], top(lower)
        if (upper, lower) not in ranks:
            return [begin, finish]
        offset = GUTTER_IN * (1 + ranks[upper, lower])
        low, high = tops[at[upper]] + heights[at[upper]] + offset, tops[at[lower]] - offset
        right = pitch_in * band[upper] + band_in + offset
        corners = [(begin[0], low), (right, low), (right, high), (finish[0], high)]
        return [begin, *corners, finish]

    boxes = {}
    for stage, (_, height) in enumerate(sizes):
        left = x[stage] - width[stage] / 2 - first + pitch_in * band[stage]
        boxes[stage] = left, top(stage), width[stage], height
    return Layout(
        boxes,
        [(edge, [way(*segment) for segment in pairwise(chain)]) for edge, chain in chains],
        pitch_in * max(band.values()) + band_in,
        max(high + height for high, height in zip(tops, heights)) + gutter_in,
    )


def _layers(stages: StageGraph) -> tuple[list[list[Node]], list[tuple[StageEdge, list[Node]]]]:
    """The boxes and wires of every layer, and of every edge what it goes through."""
    deepest = max(stages.depths.values())
    at = {stage: deepest - depth for stage, depth in stages.depths.items()}
    layers: list[list[Node]] = [[] for _ in range(deepest)]
    for stage, number in at.items():
        layers[number].append(stage)
    chains = []
    for edge in stages.edges:
        if edge.source != FEED:
            chain: list[Node] = [edge.source]
            for number in range(at[edge.source] + 1, at[edge.target]):
                chain.append((edge.source, edge.target, number))
                layers[number].append(chain[-1])
            chains.append((edge, [*chain, edge.target]))
    return layers, chains


def _order(layers: list[list[Node]], above: Neighbours, below: Neighbours) -> None:
    """Sorts every layer by the barycentres of its neighbours."""
    place = {node: number for layer in layers for number, node in enumerate(layer)}
    for sweep in range(SWEEPS):
        shown, near = (layers[-2::-1], below) if sweep % 2 else (layers[1:], above)
        for layer in shown:
            wanted = {n: mean([place[other] for other in near[n]] or [place[n]]) for n in layer}
            layer.sort(key=wanted.__getitem__)
            place.update((node, number) for number, node in enumerate(layer))


def _columns(
    layers: Sequence[Sequence[Node]],
    width: Mapping[Node, float],
    above: Neighbours,
    below: Neighbours,
) -> dict[Node, float]:
    """The middle of every box and wire: as close to its neighbours as there is room."""
    x: dict[Node, float] = dict.fromkeys(above, 0.0)
    for _ in range(SWEEPS):
        for layer in layers:
            gaps = [(width[a] + width[b]) / 2 + GAP_IN for a, b in pairwise(layer)]
            near = [[x[other] for other in (*above[n], *below[n])] or [x[n]] for n in layer]
            x.update(zip(layer, _apart([mean(found) for found in near], gaps)))
    return x


def _apart(wanted: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """Places in this order at least so far apart: the mean of the leftmost and the rightmost."""
    offsets = [*accumulate(gaps, initial=0.0)]
    free = [place - offset for place, offset in zip(wanted, offsets)]
    left, right = accumulate(free, max), [*accumulate(reversed(free), min)][::-1]
    return [(a + b) / 2 + offset for a, b, offset in zip(left, right, offsets)]


def _ports(
    x: Mapping[Node, float], width: Mapping[Node, float], above: Neighbours, below: Neighbours
) -> tuple[dict[tuple[Node, Node], float], dict[tuple[Node, Node], float]]:
    """Where edges leave what is above and reach what is below: straight down where that can be."""
    start: dict[tuple[Node, Node], float] = {}
    end: dict[tuple[Node, Node], float] = {}
    for node, lowers in below.items():
        lowers = sorted(lowers, key=x.__getitem__)
        reach = max(width[node] / 4, OUT_IN * (len(lowers) - 1) / 2)
        places = _within([x[lower] for lower in lowers], x[node], reach, OUT_IN)
        start.update(zip([(node, lower) for lower in lowers], places))
    for node, uppers in above.items():
        uppers = sorted(uppers, key=lambda upper: (x[upper], start[upper, node]))
        wanted = [start[upper, node] for upper in uppers]
        places = _within(wanted, x[node], 0.45 * width[node], IN_IN)
        end.update(zip([(upper, node) for upper in uppers], places))
    return start, end


def _within(wanted: Sequence[float], middle: float, reach: float, gap: float) -> list[float]:
    """Places on a side of a box, so far apart."""
    last = len(wanted) - 1
    return [
        min(max(place, middle - reach + number * gap), middle + reach - (last - number) * gap)
        for number, place in enumerate(_apart(wanted, [gap] * last))
    ]
