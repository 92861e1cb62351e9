"""Where the boxes and lines of a picture of a stage graph go.

Stages are drawn in layers by depth (Sugiyama, Tagawa, Toda 1981, "Methods for visual understanding
of hierarchical system structures"): edges that skip layers get a *wire* in each layer between, the
order in the layers is improved by barycentres. Then, as in visibility representations (Tamassia,
Tollis 1986), boxes may be as wide as their edges need, so an edge that crosses no other is one
straight vertical line. The columns are the mean of the leftmost and the rightmost solution of a
system of difference constraints, which centres what has room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_gpp.graph import FEED, StageGraph

BOX_GAP = 1
"""Empty columns between neighbours in a layer."""

PORT_MARGIN = 2
"""Columns between a border of a box and the edge next to it."""

SWEEPS = 8
"""How often the order in the layers is improved, down and up."""


@dataclass(frozen=True, slots=True)
class Item:
    """A box in a layer, or the wire of an edge that passes through it.

    Attributes:
        layer: from 0 at the top.
        stage: the stage of a box; the source of the edge of a wire.
        target: the target of the edge of a wire, None for a box.
    """

    layer: int
    stage: int
    target: int | None = None


@dataclass(frozen=True, slots=True)
class EdgeSegment:
    """The part of an edge between two neighbouring layers.

    Attributes:
        upper: box or wire above.
        lower: box or wire below.
    """

    upper: Item
    lower: Item


@dataclass(frozen=True, slots=True)
class PictureLayout:
    """Columns of everything.

    Attributes:
        layers: boxes and wires of each layer from left to right.
        segments: edges between each layer and the next one.
        left: column of the left border of each box, the column of each wire.
        right: column of the right border of each box, the column of each wire.
        top: column of each segment at its upper end.
        bottom: column of each segment at its lower end.
    """

    layers: tuple[tuple[Item, ...], ...]
    segments: tuple[tuple[EdgeSegment, ...], ...]
    left: Mapping[Item, int]
    right: Mapping[Item, int]
    top: Mapping[EdgeSegment, int]
    bottom: Mapping[EdgeSegment, int]

    @property
    def width(self) -> int:
        """Number of columns of the boxes and wires."""
        return 1 + max(self.right.values())


def lay_out(
    stages: StageGraph, box_width: Sequence[int], label_width: Mapping[tuple[int, int], int]
) -> PictureLayout:
    """Places the boxes and edges of a stage graph.

    Args:
        stages: the stage graph; its feed is not drawn.
        box_width: least width of the box of each stage, its borders included.
        label_width: width of what is written to the right of each edge, by (source, target).
    """
    layers, segments = _ordered_layers(stages)
    columns = _Columns(layers, segments, box_width, label_width)
    solution = columns.solve()
    return PictureLayout(
        layers=layers,
        segments=segments,
        left={item: solution[columns.left(item)] for layer in layers for item in layer},
        right={item: solution[columns.right(item)] for layer in layers for item in layer},
        top={s: solution[columns.top(s)] for gap in segments for s in gap},
        bottom={s: solution[columns.bottom(s)] for gap in segments for s in gap},
    )


Layers = tuple[tuple[Item, ...], ...]
Gaps = tuple[tuple[EdgeSegment, ...], ...]


def _ordered_layers(stages: StageGraph) -> tuple[Layers, Gaps]:
    num_layers = max(stages.depths.values())
    layer_of = {stage: num_layers - depth for stage, depth in stages.depths.items()}
    layers: list[list[Item]] = [[] for _ in range(num_layers)]
    gaps: list[list[EdgeSegment]] = [[] for _ in range(num_layers - 1)]
    for stage, layer in layer_of.items():
        layers[layer].append(Item(layer, stage))
    for edge in stages.edges:
        if edge.source == FEED:
            continue
        above = Item(layer_of[edge.source], edge.source)
        for layer in range(above.layer + 1, layer_of[edge.target] + 1):
            is_wire = layer < layer_of[edge.target]
            below = Item(layer, edge.source, edge.target) if is_wire else Item(layer, edge.target)
            if is_wire:
                layers[layer].append(below)
            gaps[layer - 1].append(EdgeSegment(above, below))
            above = below
    return _with_few_crossings(layers, gaps)


def _with_few_crossings(
    layers: list[list[Item]], gaps: list[list[EdgeSegment]]
) -> tuple[Layers, Gaps]:
    best: tuple[int, Layers] | None = None
    for sweep in range(SWEEPS + 1):
        crossings = sum(_num_crossings(gap, layers) for gap in gaps)
        if best is None or crossings < best[0]:
            best = crossings, tuple(map(tuple, layers))
        downwards = sweep % 2 == 0
        indices = range(1, len(layers)) if downwards else range(len(layers) - 2, -1, -1)
        for index in indices:
            gap = gaps[index - 1] if downwards else gaps[index]
            layers[index] = _by_barycentre(layers[index], gap, layers, downwards)
    assert best is not None
    place = _places(best[1])
    ordered = (sorted(gap, key=lambda s: (place[s.upper], place[s.lower])) for gap in gaps)
    return best[1], tuple(map(tuple, ordered))


def _by_barycentre(
    layer: list[Item], gap: Sequence[EdgeSegment], layers: Sequence[Sequence[Item]], downwards: bool
) -> list[Item]:
    place = _places(layers)
    neighbours: dict[Item, list[int]] = {item: [] for item in layer}
    for segment in gap:
        item, other = (
            (segment.lower, segment.upper) if downwards else (segment.upper, segment.lower)
        )
        neighbours[item].append(place[other])

    def key(item: Item) -> float:
        places = neighbours[item]
        return sum(places) / len(places) if places else float(place[item])

    return sorted(layer, key=key)


def _places(layers: Sequence[Sequence[Item]]) -> dict[Item, int]:
    return {item: place for layer in layers for place, item in enumerate(layer)}


def _num_crossings(gap: Sequence[EdgeSegment], layers: Sequence[Sequence[Item]]) -> int:
    place = _places(layers)
    return sum(_cross(one, other, place) for i, one in enumerate(gap) for other in gap[:i])


def _cross(one: EdgeSegment, other: EdgeSegment, place: Mapping[Item, int]) -> bool:
    above = place[one.upper] - place[other.upper]
    below = place[one.lower] - place[other.lower]
    return above * below < 0


class _Columns:
    """Difference constraints between columns: ``column[b] >= column[a] + distance``."""

    def __init__(
        self,
        layers: Layers,
        gaps: Gaps,
        box_width: Sequence[int],
        label_width: Mapping[tuple[int, int], int],
    ) -> None:
        self._same: dict[object, object] = {}
        self._constraints: dict[tuple[object, object], int] = {}
        place = _places(layers)
        for gap in gaps:
            self._join_straight(gap, place)
        for layer in layers:
            for item in layer:
                if item.target is None:
                    self._apart(self.left(item), self.right(item), box_width[item.stage] - 1)
            for item, following in zip(layer, layer[1:]):
                self._apart(self.right(item), self.left(following), BOX_GAP + 1)
        for gap in gaps:
            self._space(gap, place, label_width)

    def left(self, item: Item) -> object:
        """Variable of the left border of a box, or of a wire."""
        return self._root((item, "left" if item.target is None else "wire"))

    def right(self, item: Item) -> object:
        """Variable of the right border of a box, or of a wire."""
        return self._root((item, "right" if item.target is None else "wire"))

    def top(self, segment: EdgeSegment) -> object:
        """Variable of the upper end of a segment."""
        if segment.upper.target is not None:
            return self.left(segment.upper)
        return self._root((segment, "top"))

    def bottom(self, segment: EdgeSegment) -> object:
        """Variable of the lower end of a segment."""
        if segment.lower.target is not None:
            return self.left(segment.lower)
        return self._root((segment, "bottom"))

    def solve(self) -> dict[object, int]:
        """The mean of the leftmost and the rightmost columns."""
        names = list(dict.fromkeys(name for pair in self._constraints for name in pair))
        leftmost = self._push(names, list(self._constraints.items()))
        width = max(leftmost.values(), default=0)
        mirrored = [((b, a), distance) for (a, b), distance in self._constraints.items()]
        rightmost = self._push(names, mirrored)
        return {name: (leftmost[name] + width - rightmost[name]) // 2 for name in names}

    def _push(
        self, names: Sequence[object], constraints: Sequence[tuple[tuple[object, object], int]]
    ) -> dict[object, int]:
        column = dict.fromkeys(names, 0)
        for _ in range(len(names) + 1):
            changed = False
            for (before, after), distance in constraints:
                if column[after] < column[before] + distance:
                    column[after] = column[before] + distance
                    changed = True
            if not changed:
                return column
        raise AssertionError("the order of boxes and edges contradicts itself")

    def _join_straight(self, gap: Sequence[EdgeSegment], place: Mapping[Item, int]) -> None:
        for segment in gap:
            if not any(_cross(segment, other, place) for other in gap):
                top, bottom = self.top(segment), self.bottom(segment)
                if top != bottom:
                    self._same[top] = bottom

    def _space(
        self,
        gap: Sequence[EdgeSegment],
        place: Mapping[Item, int],
        label_width: Mapping[tuple[int, int], int],
    ) -> None:
        for segment in gap:
            if segment.upper.target is None:
                self._inside(segment.upper, self.top(segment))
            if segment.lower.target is None:
                self._inside(segment.lower, self.bottom(segment))
        for segment, following in zip(gap, gap[1:]):
            label = label_width.get(edge_of(segment), 0) if segment.upper.target is None else 0
            self._apart(self.top(segment), self.top(following), label + 3 if label else 2)
        below = sorted(gap, key=lambda s: (place[s.lower], place[s.upper]))
        for segment, following in zip(below, below[1:]):
            self._apart(self.bottom(segment), self.bottom(following), 2)

    def _inside(self, box: Item, port: object) -> None:
        self._apart(self.left(box), port, PORT_MARGIN)
        self._apart(port, self.right(box), PORT_MARGIN)

    def _apart(self, before: object, after: object, distance: int) -> None:
        pair = (before, after)
        self._constraints[pair] = max(distance, self._constraints.get(pair, distance))

    def _root(self, name: object) -> object:
        while name in self._same:
            name = self._same[name]
        return name


def edge_of(segment: EdgeSegment) -> tuple[int, int]:
    """(source, target) of the edge that a segment belongs to."""
    target = segment.lower.stage if segment.lower.target is None else segment.lower.target
    return segment.upper.stage, target
