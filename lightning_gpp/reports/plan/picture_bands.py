"""Where the layers of a picture go, in inches: below each other, in one band or several.

A stage graph that is much deeper than wide is folded: its layers go down in the first band, and
go on at the top of the band to the right of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_gpp.reports.plan.picture_layout import EdgeSegment, Item, PictureLayout, edge_of

Point = tuple[float, float]

GAP_IN = 0.42
"""Between the boxes of a layer and those of the next."""

GUTTER_IN = 0.12
"""Between neighbouring edges that go from one band to the next."""

WIDEST_RATIO = 1.5
"""Bands are added while the picture is higher than this many times its width."""


@dataclass(frozen=True, slots=True)
class Bands:
    """Layers in bands.

    Attributes:
        layout: columns of boxes and edges, in characters.
        character_in: width of a character.
        band: of each layer.
        y: upper end of each layer.
        height: of each layer.
        left: of each band.
        right: of each band, where the edges to the next one go up.
        height_in: of all.
        width_in: of all.
    """

    layout: PictureLayout
    character_in: float
    band: tuple[int, ...]
    y: tuple[float, ...]
    height: tuple[float, ...]
    left: tuple[float, ...]
    right: tuple[float, ...]
    height_in: float
    width_in: float

    def x(self, column: float, layer: int) -> float:
        """Place of a column in a layer's band."""
        return self.left[self.band[layer]] + (column + 0.5) * self.character_in

    def box(self, item: Item, height_in: float) -> tuple[float, float, float, float]:
        """Left, top, width and height of a box, which is centred in its layer."""
        left = self.x(self.layout.left[item], item.layer)
        right = self.x(self.layout.right[item], item.layer)
        return left, self._box_top(item, height_in), right - left, height_in

    def _box_top(self, item: Item, height_in: float) -> float:
        return self.y[item.layer] + (self.height[item.layer] - height_in) / 2

    def top(self, wire: Item) -> Point:
        """Upper end of a wire."""
        return self.x(self.layout.left[wire], wire.layer), self.y[wire.layer]

    def bottom(self, wire: Item) -> Point:
        """Lower end of a wire."""
        x, y = self.top(wire)
        return x, y + self.height[wire.layer]

    def start(self, segment: EdgeSegment, height_in: float) -> Point:
        """Upper end of an edge, at the box or wire above it."""
        layer = segment.upper.layer
        middle = self.y[layer] + self.height[layer] / 2
        return self.x(self.layout.top[segment], layer), middle + height_in / 2

    def end(self, segment: EdgeSegment, height_in: float) -> Point:
        """Lower end of an edge."""
        layer = segment.lower.layer
        middle = self.y[layer] + self.height[layer] / 2
        return self.x(self.layout.bottom[segment], layer), middle - height_in / 2

    def is_folded(self, segment: EdgeSegment) -> bool:
        """Whether a segment goes from one band to the next."""
        return self.band[segment.upper.layer] != self.band[segment.lower.layer]

    def way(self, segment: EdgeSegment, start: Point, end: Point) -> list[Point]:
        """Corners of a segment from the bottom of a band to the top of the next."""
        gap = self.layout.segments[segment.upper.layer]
        # The outermost on the left stays outermost: the ways are nested.
        number = len(gap) - gap.index(segment)
        offset = GUTTER_IN * number
        down = self.y[segment.upper.layer] + self.height[segment.upper.layer] + offset
        up = self.y[segment.lower.layer] - offset
        x = self.right[self.band[segment.upper.layer]] + offset
        return [start, (start[0], down), (x, down), (x, up), (end[0], up), end]


def fold(
    layout: PictureLayout,
    box_heights: Sequence[float],
    edge_texts: Mapping[tuple[int, int], str],
    character_in: float,
) -> Bands:
    """Distributes the layers over as many bands as give a picture that is not much too high.

    Args:
        layout: columns of boxes and edges.
        box_heights: height of the box of each stage, in inches.
        edge_texts: what is written beside edges, by (source, target).
        character_in: width of a character, in inches.
    """
    heights = [
        max((box_heights[item.stage] for item in layer if item.target is None), default=0.0)
        for layer in layout.layers
    ]
    for num_bands in range(1, len(heights) + 1):
        bands = _bands(layout, heights, edge_texts, character_in, num_bands)
        if bands.height_in <= WIDEST_RATIO * bands.width_in:
            break
    return bands


def _bands(
    layout: PictureLayout,
    heights: Sequence[float],
    edge_texts: Mapping[tuple[int, int], str],
    character_in: float,
    num_bands: int,
) -> Bands:
    per_band = -(-len(heights) // num_bands)
    band = [layer // per_band for layer in range(len(heights))]
    num_bands = band[-1] + 1
    crossing = [
        len(layout.segments[layer]) if band[layer] != band[layer + 1] else 0
        for layer in range(len(heights) - 1)
    ]
    most = GUTTER_IN * (max(crossing, default=0) + 1) if num_bands > 1 else 0.0
    y: list[float] = []
    for layer in range(len(heights)):
        first = layer == 0 or band[layer] != band[layer - 1]
        y.append(most if first else y[-1] + heights[layer - 1] + GAP_IN)
    left, right, x = [], [], 0.0
    for number in range(num_bands):
        inside = [layer for layer in range(len(heights)) if band[layer] == number]
        columns = _columns(layout, inside, edge_texts)
        left.append(x - columns[0] * character_in)
        right.append(x + (columns[1] - columns[0] + 1) * character_in)
        x = right[-1] + (GUTTER_IN * (crossing[inside[-1]] + 1) if number < num_bands - 1 else 0)
    return Bands(
        layout=layout,
        character_in=character_in,
        band=tuple(band),
        y=tuple(y),
        height=tuple(heights),
        left=tuple(left),
        right=tuple(right),
        height_in=max(top + height for top, height in zip(y, heights)) + most,
        width_in=x,
    )


def _columns(
    layout: PictureLayout, layers: Sequence[int], edge_texts: Mapping[tuple[int, int], str]
) -> tuple[int, int]:
    """First and last column in use in some layers."""
    items = [item for layer in layers for item in layout.layers[layer]]
    below = [gap for layer in layers for gap in layout.segments[layer : layer + 1]]
    texts = [
        layout.top[segment] + 2 + len(edge_texts.get(edge_of(segment), ""))
        for gap in below
        for segment in gap
        if segment.upper.target is None
    ]
    return min(layout.left[i] for i in items), max([layout.right[i] for i in items] + texts)
