"""A picture of a stage graph: boxes in layers by depth, with bars for time and memory.

Branches stand side by side, replicas of a stage are stacked boxes, the bottleneck has a mark.
Graphs that are much deeper than wide are folded into bands beside each other, so that a chain of
32 stages stays readable. Columns are those of :mod:`lightning_gpp.reports.plan.picture_layout`, in
characters of a monospaced font. Colours are those of Okabe and Ito ("Color Universal Design",
2008), lightened where text stands on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_gpp.graph import FEED, StageGraph
from lightning_gpp.reports.plan.picture_bands import Bands, fold
from lightning_gpp.reports.plan.picture_layout import EdgeSegment, Item, edge_of, lay_out
from lightning_gpp.reports.plan.picture_shapes import (
    Picture,
    Point,
    Polyline,
    Rectangle,
    Text,
    curve,
)

TEXT_PT, SMALL_PT, TITLE_PT = 8.0, 7.0, 12.0
CHARACTER_IN = 0.602 * TEXT_PT / 72
"""Width of a character of DejaVu Sans Mono."""

LINE_IN = 0.155
PADDING_IN = 0.06
STACK_IN = 0.05
"""How far each replica's box sticks out behind the one before it."""

MOST_STACKED = 3
HEAD_IN, FOOT_IN, SIDE_IN = 0.62, 0.42, 0.25
THIN_PT, THICK_PT = 0.9, 2.2
TIME_COLOURS = {"compute": "#9CCBEA", "communication": "#8FD6BE"}
MEMORY_COLOUR = "#E6BBD4"
BOTTLENECK_COLOUR = "#D55E00"
BOTTLENECK_BAR_COLOUR = "#E19A62"
BAR_COLOUR = "#F4F4F4"
EDGE_COLOUR = "#555555"
ORDER_COLOUR = "#AAAAAA"
LEGEND = (
    (TIME_COLOURS["compute"], "time per sample: compute"),
    (TIME_COLOURS["communication"], "communication"),
    (BOTTLENECK_COLOUR, "the bottleneck"),
    (MEMORY_COLOUR, "memory, in parts of the device's"),
)


@dataclass(frozen=True, slots=True)
class StageBox:
    """What is written into the box of a stage.

    Attributes:
        lines: text; the first line is bold.
        time_text: text on the bar of the time; no bars where it is empty.
        time_share: time per sample in parts of the bottleneck's, at most 1.
        bound: what takes the stage's time: ``"compute"`` or ``"communication"``.
        memory_text: text on the bar of the memory.
        memory_share: memory in parts of the device's, 0 where that has no limit.
        num_replicas: boxes in the stack.
        is_bottleneck: whether it bounds the step.
    """

    lines: tuple[str, ...]
    time_text: str = ""
    time_share: float = 0.0
    bound: str = "compute"
    memory_text: str = ""
    memory_share: float = 0.0
    num_replicas: int = 1
    is_bottleneck: bool = False

    @property
    def num_columns(self) -> int:
        """Width in characters, borders included."""
        texts = (*self.lines, self.time_text, self.memory_text)
        return 3 + max(map(len, texts)) + (2 if self.num_replicas > 1 else 0)

    @property
    def height_in(self) -> float:
        """Height, the stack behind it included."""
        num_bars = 2 if self.time_text else 0
        return LINE_IN * (len(self.lines) + num_bars) + 3 * PADDING_IN + self.stack_in

    @property
    def stack_in(self) -> float:
        """How far the replicas behind the first stick out."""
        return STACK_IN * min(self.num_replicas - 1, MOST_STACKED - 1)


def stage_graph_picture(
    stages: StageGraph,
    boxes: Sequence[StageBox],
    edge_texts: Mapping[tuple[int, int], str],
    *,
    title: str,
    subtitle: str = "",
) -> Picture:
    """What is on the picture of a stage graph.

    Args:
        stages: the stage graph; its feed is not drawn.
        boxes: what is in the box of each stage.
        edge_texts: what is written beside edges, by (source, target).
        title: first line above the picture.
        subtitle: second line.
    """
    layout = lay_out(
        stages,
        box_width=[box.num_columns for box in boxes],
        label_width={edge: len(text) for edge, text in edge_texts.items()},
    )
    bands = fold(layout, [box.height_in for box in boxes], edge_texts, CHARACTER_IN)
    columns = max(len(title) * TITLE_PT / TEXT_PT, len(subtitle))
    legend_in = sum(_entry_in(text) for _, text in LEGEND)
    width = max(bands.width_in, columns * CHARACTER_IN, legend_in) + 2 * SIDE_IN
    height = bands.height_in + HEAD_IN + FOOT_IN
    left = (width - bands.width_in) / 2
    graph = _GraphShapes(stages, bands, edge_texts, boxes)
    shapes = (
        Text(SIDE_IN, 0.25, title, TITLE_PT, is_bold=True, is_mono=False),
        Text(SIDE_IN, 0.46, subtitle, TEXT_PT, "#444444", is_mono=False),
        *(_moved(shape, left, HEAD_IN) for shape in (*graph.edges(), *graph.boxes())),
        *_legend(SIDE_IN, height - 0.18),
    )
    return Picture(width, height, shapes)


def _moved(shape: Rectangle | Polyline | Text, x: float, y: float) -> Rectangle | Polyline | Text:
    if isinstance(shape, Polyline):
        return replace(shape, points=tuple((x + place[0], y + place[1]) for place in shape.points))
    return replace(shape, x=shape.x + x, y=shape.y + y)


class _GraphShapes:
    """Shapes of boxes and edges; the upper left corner of the bands is at (0, 0)."""

    def __init__(
        self,
        stages: StageGraph,
        bands: Bands,
        edge_texts: Mapping[tuple[int, int], str],
        boxes: Sequence[StageBox],
    ) -> None:
        self._bands = bands
        self._texts = edge_texts
        self._boxes = boxes
        edges = [edge for edge in stages.edges if edge.source != FEED]
        self._forward_only = {(e.source, e.target) for e in edges if not e.has_backward}
        self._order_only = {(e.source, e.target) for e in edges if not e.values}

    def edges(self) -> Iterator[Polyline | Text]:
        """The lines between boxes, and what is written beside them."""
        layout = self._bands.layout
        for wire in (item for layer in layout.layers for item in layer):
            if wire.target is not None:
                ends = (self._bands.top(wire), self._bands.bottom(wire))
                yield self._line(ends, (wire.stage, wire.target))
        segments = [segment for gap in layout.segments for segment in gap]
        yield from map(self._edge, segments)
        for segment in segments:
            if segment.upper.target is None and edge_of(segment) in self._texts:
                yield self._edge_text(segment)

    def boxes(self) -> Iterator[Rectangle | Text]:
        """The boxes of the stages."""
        for layer in self._bands.layout.layers:
            for item in layer:
                if item.target is None:
                    yield from self._box(item, self._boxes[item.stage])

    def _edge(self, segment: EdgeSegment) -> Polyline:
        start, end = self._start(segment), self._end(segment)
        if self._bands.is_folded(segment):
            points = tuple(self._bands.way(segment, start, end))
        else:
            points = (start, end) if start[0] == end[0] else curve(start, end)
        return self._line(points, edge_of(segment), has_tip=segment.lower.target is None)

    def _edge_text(self, segment: EdgeSegment) -> Text:
        x, y = self._start(segment)
        return Text(
            x + CHARACTER_IN,
            y + LINE_IN * 0.6,
            self._texts[edge_of(segment)],
            SMALL_PT,
            EDGE_COLOUR,
            is_on_line=True,  # edges that bend or are folded pass there
        )

    def _line(
        self, points: tuple[Point, ...], edge: tuple[int, int], *, has_tip: bool = False
    ) -> Polyline:
        is_order = edge in self._order_only
        return Polyline(
            points,
            ORDER_COLOUR if is_order else EDGE_COLOUR,
            THIN_PT,
            is_dotted=is_order or edge in self._forward_only,
            has_tip=has_tip,
        )

    def _start(self, segment: EdgeSegment) -> Point:
        return self._bands.start(segment, self._height(segment.upper))

    def _end(self, segment: EdgeSegment) -> Point:
        return self._bands.end(segment, self._height(segment.lower))

    def _height(self, item: Item) -> float:
        """Of a box, or of the layer that a wire goes through."""
        is_wire = item.target is not None
        return self._bands.height[item.layer] if is_wire else self._boxes[item.stage].height_in

    def _box(self, item: Item, box: StageBox) -> Iterator[Rectangle | Text]:
        x, y, width, height = self._bands.box(item, box.height_in)
        width -= 2 * CHARACTER_IN if box.num_replicas > 1 else 0
        y, height = y + box.stack_in, height - box.stack_in
        border = BOTTLENECK_COLOUR if box.is_bottleneck else "#000000"
        border_pt = THICK_PT if box.is_bottleneck else THIN_PT
        for behind in reversed(range(min(box.num_replicas, MOST_STACKED))):
            offset = STACK_IN * behind
            face = "#EEEEEE" if behind else "#FFFFFF"
            yield Rectangle(x + offset, y - offset, width, height, face, border, border_pt)
        for number, text in enumerate(box.lines):
            line_y = y + PADDING_IN + LINE_IN * (number + 0.5)
            yield _centred(x + width / 2, line_y, text, is_bold=number == 0)
        if box.time_text:
            y += PADDING_IN * 1.5 + LINE_IN * len(box.lines)
            yield from _bars(x + PADDING_IN, y, width - 2 * PADDING_IN, box)


def _bars(x: float, y: float, width: float, box: StageBox) -> Iterator[Rectangle | Text]:
    time_colour = BOTTLENECK_BAR_COLOUR if box.is_bottleneck else TIME_COLOURS[box.bound]
    yield from _bar(x, y, width, box.time_share, time_colour, box.time_text)
    y += LINE_IN + PADDING_IN / 2
    yield from _bar(x, y, width, box.memory_share, MEMORY_COLOUR, box.memory_text)


def _bar(
    x: float, y: float, width: float, share: float, colour: str, text: str
) -> Iterator[Rectangle | Text]:
    yield Rectangle(x, y, width, LINE_IN, BAR_COLOUR)
    yield Rectangle(x, y, width * min(1.0, share), LINE_IN, colour)
    yield _centred(x + width / 2, y + LINE_IN / 2, text)


def _centred(x: float, y: float, text: str, *, is_bold: bool = False) -> Text:
    return Text(x, y, text, TEXT_PT, is_bold=is_bold, is_centred=True)


def _legend(x: float, y: float) -> Iterator[Rectangle | Text]:
    for colour, text in LEGEND:
        yield Rectangle(x, y - 0.06, 0.16, 0.12, colour)
        yield Text(x + 0.22, y, text, SMALL_PT)
        x += _entry_in(text)


def _entry_in(text: str) -> float:
    """Width of an entry of the legend, with the space behind it."""
    return 0.22 + (len(text) + 3) * CHARACTER_IN * SMALL_PT / TEXT_PT
