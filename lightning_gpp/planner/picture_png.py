"""A picture of a stage graph as a PNG: boxes in layers by depth, with bars for time and memory.

Branches stand side by side, replicas of a stage are stacked boxes, the bottleneck has a mark.
Graphs that are much deeper than wide are folded into bands beside each other, so that a chain of
32 stages stays readable. Columns are those of :mod:`lightning_gpp.planner.picture_layout`, in
characters of a monospaced font.

matplotlib is imported when a picture is made. Figures are made without pyplot and in matplotlib's
default style, so the user's figures, backend and style stay as they are. Colours are those of
Okabe and Ito ("Color Universal Design", 2008), lightened where text stands on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_gpp.graph import FEED, StageGraph
from lightning_gpp.planner.picture_bands import Bands, fold
from lightning_gpp.planner.picture_layout import Item, Segment, edge_of, lay_out

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.path import Path as Curve

DPI = 120
TEXT_PT, SMALL_PT, TITLE_PT = 8.0, 7.0, 12.0
CHARACTER_IN = 0.602 * TEXT_PT / 72
"""Width of a character of DejaVu Sans Mono, which matplotlib ships."""

LINE_IN = 0.155
PADDING_IN = 0.06
STACK_IN = 0.05
"""How far each replica's box sticks out behind the one before it."""

MOST_STACKED = 3
HEAD_IN, FOOT_IN, SIDE_IN = 0.62, 0.42, 0.25
FEWEST_COLUMNS = 88
"""Columns that the title and the legend need."""

TIME_COLOURS = {"compute": "#9CCBEA", "communication": "#8FD6BE"}
MEMORY_COLOUR = "#E6BBD4"
BOTTLENECK_COLOUR = "#D55E00"
EDGE_COLOUR = "#555555"
ORDER_COLOUR = "#AAAAAA"


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


def write_stage_graph(
    path: Path,
    stages: StageGraph,
    boxes: Sequence[StageBox],
    edge_texts: dict[tuple[int, int], str],
    *,
    title: str,
    subtitle: str = "",
) -> None:
    """Writes a PNG of a stage graph.

    Args:
        path: the file.
        stages: the stage graph; its feed is not drawn.
        boxes: what is in the box of each stage.
        edge_texts: what is written beside edges, by (source, target).
        title: first line above the picture.
        subtitle: second line.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = stage_graph_figure(stages, boxes, edge_texts, title=title, subtitle=subtitle)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=DPI)


def stage_graph_figure(
    stages: StageGraph,
    boxes: Sequence[StageBox],
    edge_texts: dict[tuple[int, int], str],
    *,
    title: str,
    subtitle: str = "",
) -> Figure:
    """The picture as a matplotlib figure, which belongs to no window and not to pyplot."""
    import matplotlib.style
    from matplotlib.figure import Figure

    layout = lay_out(
        stages,
        box_width=[box.num_columns for box in boxes],
        label_width={edge: len(text) for edge, text in edge_texts.items()},
    )
    bands = fold(layout, [box.height_in for box in boxes], edge_texts, CHARACTER_IN)
    columns = max(FEWEST_COLUMNS, len(title) * TITLE_PT / TEXT_PT, len(subtitle))
    width_in = max(bands.width_in, columns * CHARACTER_IN) + 2 * SIDE_IN
    height_in = bands.height_in + HEAD_IN + FOOT_IN
    with matplotlib.style.context("default"):
        figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white")
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        left = SIDE_IN + (width_in - 2 * SIDE_IN - bands.width_in) / 2
        axes.set(xlim=(-left, width_in - left), ylim=(height_in - HEAD_IN, -HEAD_IN))
        _Drawing(axes, stages, bands, edge_texts).draw(boxes)
        x = SIDE_IN - left
        axes.text(x, 0.25 - HEAD_IN, title, size=TITLE_PT, weight="bold", va="center")
        axes.text(x, 0.46 - HEAD_IN, subtitle, size=TEXT_PT, color="#444444", va="center")
        _draw_legend(axes, x, height_in - HEAD_IN - 0.18)
    return figure


class _Drawing:
    """Puts boxes and edges on axes whose units are inches, y downwards."""

    def __init__(
        self,
        axes: Axes,
        stages: StageGraph,
        bands: Bands,
        edge_texts: dict[tuple[int, int], str],
    ) -> None:
        self._axes = axes
        self._bands = bands
        self._texts = edge_texts
        edges = [edge for edge in stages.edges if edge.source != FEED]
        self._forward_only = {(e.source, e.target) for e in edges if not e.has_backward}
        self._order_only = {(e.source, e.target) for e in edges if not e.values}

    def draw(self, boxes: Sequence[StageBox]) -> None:
        """Draws everything."""
        layout = self._bands.layout
        for layer in layout.layers:
            for item in layer:
                if item.target is None:
                    self._box(item, boxes[item.stage])
                else:
                    ends = [self._bands.top(item), self._bands.bottom(item)]
                    self._line(ends, (item.stage, item.target))
        for gap in layout.segments:
            for segment in gap:
                self._edge(segment, boxes)

    def _box(self, item: Item, box: StageBox) -> None:
        from matplotlib.patches import Rectangle

        x, y, width, height = self._bands.box(item, box.height_in)
        width -= 2 * CHARACTER_IN if box.num_replicas > 1 else 0
        y, height = y + box.stack_in, height - box.stack_in
        colour = BOTTLENECK_COLOUR if box.is_bottleneck else "black"
        line = 2.2 if box.is_bottleneck else 0.9
        for behind in reversed(range(min(box.num_replicas, MOST_STACKED))):
            offset = STACK_IN * behind
            self._axes.add_patch(
                Rectangle(
                    (x + offset, y - offset),
                    *(width, height),
                    facecolor="white" if not behind else "#EEEEEE",
                    edgecolor=colour,
                    linewidth=line,
                    zorder=3,
                )
            )
        middle = x + width / 2
        for number, text in enumerate(box.lines):
            weight = "bold" if number == 0 else "normal"
            self._text(middle, y + PADDING_IN + LINE_IN * (number + 0.5), text, weight=weight)
        if box.time_text:
            self._bars(x, y, width, box)

    def _bars(self, x: float, y: float, width: float, box: StageBox) -> None:
        top = y + PADDING_IN * 1.5 + LINE_IN * len(box.lines)
        time_colour = BOTTLENECK_COLOUR + "99" if box.is_bottleneck else TIME_COLOURS[box.bound]
        self._bar(x, top, width, box.time_share, time_colour, box.time_text)
        top += LINE_IN + PADDING_IN / 2
        self._bar(x, top, width, box.memory_share, MEMORY_COLOUR, box.memory_text)

    def _bar(self, x: float, y: float, width: float, share: float, colour: str, text: str) -> None:
        from matplotlib.patches import Rectangle

        x, width = x + PADDING_IN, width - 2 * PADDING_IN
        for part, face in ((1.0, "#F4F4F4"), (min(1.0, share), colour)):
            self._axes.add_patch(
                Rectangle((x, y), width * part, LINE_IN, facecolor=face, linewidth=0, zorder=4)
            )
        self._text(x + width / 2, y + LINE_IN / 2, text)

    def _edge(self, segment: Segment, boxes: Sequence[StageBox]) -> None:
        edge = edge_of(segment)
        upper, lower = segment.upper, segment.lower
        start = self._bands.start(segment, self._height(upper, boxes))
        end = self._bands.end(segment, self._height(lower, boxes))
        if self._bands.is_folded(segment):
            self._line(self._bands.way(segment, start, end), edge, arrow=lower.target is None)
        else:
            self._curve(start, end, edge, arrow=lower.target is None)
        if upper.target is None:
            self._text(
                start[0] + CHARACTER_IN,
                start[1] + LINE_IN * 0.6,
                self._texts.get(edge, ""),
                size=SMALL_PT,
                align="left",
                color=EDGE_COLOUR,
            )

    def _height(self, item: Item, boxes: Sequence[StageBox]) -> float:
        """Of a box, or of the layer that a wire goes through."""
        is_wire = item.target is not None
        return self._bands.height[item.layer] if is_wire else boxes[item.stage].height_in

    def _curve(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        edge: tuple[int, int],
        arrow: bool,
    ) -> None:
        from matplotlib.path import Path as Curve

        middle = (start[1] + end[1]) / 2
        points = [start, (start[0], middle), (end[0], middle), end]
        self._patch(Curve(points, [Curve.MOVETO, *[Curve.CURVE4] * 3]), edge, arrow)

    def _line(
        self, points: Sequence[tuple[float, float]], edge: tuple[int, int], arrow: bool = False
    ) -> None:
        from matplotlib.path import Path as Curve

        self._patch(Curve(points), edge, arrow)

    def _patch(self, path: Curve, edge: tuple[int, int], arrow: bool) -> None:
        from matplotlib.patches import FancyArrowPatch

        is_order = edge in self._order_only
        self._axes.add_patch(
            FancyArrowPatch(
                path=path,
                arrowstyle="-|>" if arrow else "-",
                mutation_scale=8,
                shrinkA=0,
                shrinkB=0,
                linewidth=0.9,
                linestyle=":" if is_order or edge in self._forward_only else "-",
                color=ORDER_COLOUR if is_order else EDGE_COLOUR,
                zorder=2,
            )
        )

    def _text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = TEXT_PT,
        align: str = "center",
        weight: str = "normal",
        color: str = "black",
    ) -> None:
        self._axes.text(
            *(x, y, text),
            size=size,
            ha=align,
            va="center_baseline",
            weight=weight,
            color=color,
            family="DejaVu Sans Mono",
            zorder=5,
        )


LEGEND = (
    (TIME_COLOURS["compute"], "time per sample: compute"),
    (TIME_COLOURS["communication"], "communication"),
    (BOTTLENECK_COLOUR, "the bottleneck"),
    (MEMORY_COLOUR, "memory, in parts of the device's"),
)


def _draw_legend(axes: Axes, x: float, y: float) -> None:
    from matplotlib.patches import Rectangle

    for colour, text in LEGEND:
        axes.add_patch(Rectangle((x, y - 0.06), 0.16, 0.12, facecolor=colour, linewidth=0))
        axes.text(x + 0.22, y, text, size=SMALL_PT, va="center", family="DejaVu Sans Mono")
        x += 0.22 + (len(text) + 3) * CHARACTER_IN * SMALL_PT / TEXT_PT
