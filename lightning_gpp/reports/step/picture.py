"""One or several steps (predicted and measured) as a picture.

Each timeline has a row per rank, in it a lane per stage; what is not of a stage (messages, waiting,
the optimizer) takes the whole row. The critical path is a black line along what it goes through,
and from rank to rank where it goes over a message or a sum. Time goes to the right; y is inches
from the top. With many ranks rows get thinner, and texts leave out what does not fit any more. What
needs room (memory, operators, versions of weights) is on the page.

matplotlib is imported when a picture is made. Figures are made without pyplot and in matplotlib's
default style, so the user's figures, backend and style stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_gpp.common.units_of_measure import percent_text
from lightning_gpp.reports.step.paint import (
    IDLE_COLOUR,
    PAINT_OF,
    PAINTS,
    PATH_COLOUR,
    num_microbatches,
    path_pieces,
    path_text,
    stage_lines,
    subtitle,
    title,
)
from lightning_gpp.simulate.timeline.shares import shares
from lightning_gpp.simulate.timeline.span import Span
from lightning_gpp.simulate.timeline.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patheffects import AbstractPathEffect

DPI = 150
LEFT_IN, RIGHT_IN = 1.45, 0.95
LINE_IN, TICKS_IN = 0.24, 0.40
AXIS_IN, LEGEND_IN, STAGE_LINE_IN = 0.55, 0.35, 0.21
LANE_IN, THINNEST_LANE_IN, ROOM_IN = 0.40, 0.06, 7.0
"""Height of a lane, and what all lanes of a picture share where they are many."""
GAP = 0.35
"""Between rows, in parts of a lane."""
TITLE_PT, TEXT_PT, SMALLEST_PT, NUMBER_PT = 13.0, 10.0, 5.5, 8.0
DIGIT_WIDTH = 0.64
"""Width of a digit in units of the font size."""
PATH_DEPTH = 0.84
"""Where in a lane the critical path goes, in parts of its height."""
TOO_UNLIKE = 3.0
"""A step shorter by more than this factor has an axis of its own: on the other it is a stripe."""


def timeline_figure(shown: Sequence[Timeline]) -> Figure:
    """The picture as a matplotlib figure, which belongs to no window and not to pyplot."""
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(shown)
    most = max((t.stages for t in shown), key=lambda stages: sum(len(s.label) for s in stages))
    stages = stage_lines(most, 1 if len(most) <= 4 else 2 if len(most) <= 16 else 3)
    height_in = sum(panel.height_in for panel in panels) + AXIS_IN - TICKS_IN + LEGEND_IN
    height_in += STAGE_LINE_IN * len(stages) + 0.15
    width_in = max(map(_width_in, panels))
    left, width = LEFT_IN / width_in, (width_in - LEFT_IN - RIGHT_IN) / width_in
    with matplotlib.style.context("default"):
        figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white")
        FigureCanvasAgg(figure)
        bottom_in = 0.05
        for panel in panels:
            _write_head(figure, panel, left, bottom_in)
            bottom_in += panel.height_in
            below = 1 - (bottom_in - TICKS_IN) / height_in
            axes = figure.add_axes((left, below, width, panel.rows.height_in / height_in))
            _draw_panel(panel, axes)
        axes.set_xlabel("time since the step began (ms)", size=TEXT_PT)
        top_in = bottom_in - TICKS_IN + AXIS_IN
        _draw_legend(figure, shown, (left, 1 - top_in / height_in))
        for number, line in enumerate(stages):
            y = 1 - (top_in + LEGEND_IN + STAGE_LINE_IN * (number + 0.5)) / height_in
            for column, text in enumerate(line):
                x = left + column * (1 - left) / len(stages[0])
                figure.text(x, y, text, size=TEXT_PT - 1, va="center", color="#222222")
    return figure


class Rows:
    """Positions of the rows of ranks and the lanes of stages: (top, height) in inches."""

    def __init__(self, timeline: Timeline, lane_in: float) -> None:
        self.lane_in = lane_in
        self.row: dict[int, tuple[float, float]] = {}
        self.lane: dict[int | None, tuple[float, float]] = {}
        top = GAP * self.lane_in / 2
        for rank in range(timeline.num_ranks):
            stages = timeline.stages_of(rank)
            for number, stage in enumerate(stages):
                self.lane[stage.id] = (top + number * self.lane_in, self.lane_in)
            self.row[rank] = (top, self.lane_in * max(1, len(stages)))
            top += self.row[rank][1] + GAP * self.lane_in
        self.height_in = top - GAP * self.lane_in / 2
        self.lane_pt = self.lane_in * 72
        self.has_numbers = self.lane_pt >= 1.8 * NUMBER_PT
        self.text_pt = min(TEXT_PT, max(SMALLEST_PT, self.lane_pt * 0.85))
        pitch_pt = max(1, int(self.lane_pt * (1 + GAP)))
        self.named = range(0, timeline.num_ranks, -(-int(SMALLEST_PT * 1.3) // pitch_pt) or 1)

    def place(self, span: Span) -> tuple[float, float]:
        """(top, height) of a span."""
        if PAINT_OF[span.kind].in_lane and span.stage in self.lane:
            return self.lane[span.stage]
        return self.row[span.rank]  # also for the backward of the feed, which is of no stage


class _Panel(NamedTuple):
    """One set of rows and what is written above it; the first line is its title."""

    timeline: Timeline
    rows: Rows
    until_s: float
    lines: Sequence[str]

    @property
    def height_in(self) -> float:
        """Of all, the numbers below the axis included."""
        return 0.30 + LINE_IN * len(self.lines) + self.rows.height_in + TICKS_IN


def _panels(timelines: Sequence[Timeline]) -> list[_Panel]:
    """The steps."""
    num_lanes = sum(
        max(1, len(t.stages_of(rank))) for t in timelines for rank in range(t.num_ranks)
    )
    lane_in = min(LANE_IN, max(THINNEST_LANE_IN, ROOM_IN / max(1, num_lanes)))
    measured = next((t for t in timelines if t.source != "predicted"), None)
    longest_s = max(timeline.step_s for timeline in timelines)
    steps = []
    for timeline in timelines:
        is_unlike = timeline.step_s * TOO_UNLIKE < longest_s
        until_s = timeline.step_s if is_unlike else longest_s
        scale = "  ·  on a scale of its own" if is_unlike else ""
        lines = [title(timeline, measured), f"{subtitle(timeline)}{scale}"]
        lines += filter(None, [path_text(timeline)])
        steps.append(_Panel(timeline, Rows(timeline, lane_in), until_s, lines))
    return steps


def _width_in(panel: _Panel) -> float:
    """Wider for more micro-batches, so that their numbers find room where they are written."""
    widest = 24.0 if panel.rows.has_numbers else 16.0
    return min(widest, max(12.0, 12.0 + 0.3 * (num_microbatches(panel.timeline) - 8)))


def _write_head(figure: Figure, panel: _Panel, left: float, top_in: float) -> None:
    top_in += 0.06
    for number, line in enumerate(panel.lines):
        top_in += LINE_IN
        look = {"color": "#444444"} if number else {"size": TITLE_PT, "weight": "bold"}
        figure.text(left, 1 - top_in / figure.get_figheight(), line, **({"size": TEXT_PT} | look))


def _draw_panel(panel: _Panel, axes: Axes) -> None:
    """Draws the rows; x is milliseconds.

    The bars of one colour in one row or lane are one collection, whose gid is
    ``"<legend>/<rank>/<stage or row>"``. The critical path is a collection
    ``"path"``, with ``"path jumps"`` between its parts.
    """
    timeline, rows = panel.timeline, panel.rows
    axes.set_xlim(0, max(panel.until_s, 1e-9) * 1e3)
    axes.set_ylim(rows.height_in, 0)
    axes.tick_params(axis="x", labelsize=TEXT_PT - 1)
    axes.set_yticks([])
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "left", "right"]].set_visible(False)
    for place in rows.row.values():
        axes.broken_barh([(0, timeline.step_s * 1e3)], place, facecolor=IDLE_COLOUR)
    _draw_bars(timeline, rows, axes)
    _draw_numbers(timeline, rows, axes)
    _draw_path(timeline, rows, axes)
    bubbles = [percent_text(share.bubble_share, 1) for share in shares(timeline).ranks]
    for rank in rows.named:
        middle = rows.row[rank][0] + rows.row[rank][1] / 2
        _beside(axes, 0, middle, f"rank {rank}", 0.15 - LEFT_IN, size=rows.text_pt)
        _beside(axes, 1, middle, bubbles[rank], 0.1, size=rows.text_pt)
    look: dict[str, Any] = {"color": "#444444"}
    for stage in timeline.stages:
        if stage.id in rows.lane and stage.rank in rows.named:
            middle = sum(rows.lane[stage.id]) - rows.lane_in / 2
            _beside(axes, 0, middle, stage.title, -0.1, size=rows.text_pt, ha="right", **look)
    _beside(axes, 1, -0.04, "bubble", 0.1, size=TEXT_PT - 1, va="bottom", **look)


def _beside(axes: Axes, x: int, y: float, text: str, right_in: float, **look: Any) -> None:
    """Writes at the left (0) or right (1) of axes, moved to the right."""
    from matplotlib.transforms import offset_copy

    figure = axes.figure.get_figure(root=True)
    place = offset_copy(axes.get_yaxis_transform(), figure, x=right_in, units="inches")
    axes.text(x, y, text, transform=place, **({"va": "center_baseline", "ha": "left"} | look))


def _draw_bars(timeline: Timeline, rows: Rows, axes: Axes) -> None:
    for paint in PAINTS:
        bars: dict[tuple[int, int | None], list[Span]] = {}
        for span in timeline.spans:
            if span.kind in paint.kinds:
                lane = span.stage if paint.in_lane and span.stage in rows.lane else None
                bars.setdefault((span.rank, lane), []).append(span)
        for (rank, lane), spans in bars.items():
            axes.broken_barh(
                [(span.start_s * 1e3, span.duration_s * 1e3) for span in spans],
                rows.place(spans[0]),
                facecolor=paint.colour,
                edgecolor="white",
                linewidth=min(0.4, rows.lane_in) if paint.in_lane else 0,
                gid=f"{paint.legend}/{rank}/{'row' if lane is None else lane}",
                zorder=2,
            )


def _draw_numbers(timeline: Timeline, rows: Rows, axes: Axes) -> None:
    """The micro-batch of every bar that has room for it."""
    if not rows.has_numbers:
        return
    width_in = axes.get_position().width * axes.figure.get_figure(root=True).get_figwidth()
    pt_per_s = width_in * 72e3 / axes.get_xlim()[1]
    look: dict[str, Any] = {"ha": "center", "va": "center_baseline", "zorder": 5, "size": NUMBER_PT}
    part = 0.42 if timeline.critical_path else 0.5
    for span in timeline.spans:
        paint, number = PAINT_OF[span.kind], str(span.microbatch)
        width_pt = (len(number) + 0.5) * DIGIT_WIDTH * NUMBER_PT  # with some room
        if paint.in_lane and span.duration_s * pt_per_s >= width_pt:
            top, height = rows.place(span)
            around, middle_ms = _around(paint.colour, 2.0), (span.start_s + span.end_s) / 2 * 1e3
            y = top + height * part
            axes.text(middle_ms, y, number, color=paint.text, path_effects=around, **look)


def _around(colour: str, width_pt: float) -> list[AbstractPathEffect]:
    """A rim around a text or a line, so that it is seen on whatever is behind it."""
    from matplotlib.patheffects import Normal, Stroke

    return [Stroke(linewidth=width_pt, foreground=colour), Normal()]


def _draw_path(timeline: Timeline, rows: Rows, axes: Axes) -> None:
    """Black lines with a white rim, so that they are seen on every colour; thin ones between."""
    from matplotlib.collections import LineCollection

    along = []
    for piece in path_pieces(timeline):
        top, height = rows.row[piece.rank] if piece.span is None else rows.place(piece.span)
        y = top + PATH_DEPTH * height
        along.append(((piece.start_s * 1e3, y), (piece.end_s * 1e3, y)))
    jumps = [(one[1], other[0]) for one, other in pairwise(along) if one[1] != other[0]]
    width_pt = min(2.4, max(0.9, rows.lane_pt * 0.16))
    look: dict[str, Any] = {"colors": PATH_COLOUR, "capstyle": "projecting", "zorder": 4}
    for name, lines, points in (("path jumps", jumps, width_pt / 2), ("path", along, width_pt)):
        around = _around("white", points + min(1.6, width_pt))
        found = LineCollection(
            lines, linewidths=points, gid=name, path_effects=around, clip_on=False, **look
        )
        if lines:
            axes.add_collection(found, autolim=False)


def _draw_legend(
    figure: Figure, timelines: Sequence[Timeline], corner: tuple[float, float]
) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    present = {span.kind for timeline in timelines for span in timeline.spans if span.duration_s}
    handles: list[Patch | Line2D] = [
        Patch(facecolor=paint.colour, label=paint.legend)
        for paint in PAINTS
        if present.intersection(paint.kinds)
    ]
    handles.append(Patch(facecolor=IDLE_COLOUR, edgecolor="#BBBBBB", label="idle"))
    if any(timeline.critical_path for timeline in timelines):
        handles.append(Line2D([], [], color=PATH_COLOUR, linewidth=2.2, label="critical path"))
    look: dict[str, Any] = {"loc": "upper left", "frameon": False, "fontsize": TEXT_PT - 1}
    look |= {"borderpad": 0, "borderaxespad": 0, "columnspacing": 1.2}
    look |= {"handlelength": 1.3, "handletextpad": 0.5}
    figure.legend(handles=handles, bbox_to_anchor=corner, ncols=len(handles), **look)
