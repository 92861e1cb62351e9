"""Draws one timeline: one row per rank, time to the right.

Every stage of a rank has a lane of its own in the rank's row; what is not of a stage (messages,
waiting, the optimizer) takes the whole row. The critical path is a black line along what it goes
through, and from rank to rank where it goes over a message or a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_gpp.common.units_of_measure import percent_text
from lightning_gpp.reports.step.paint import IDLE_COLOUR, PAINT_OF, PAINTS, PATH_COLOUR, Paint
from lightning_gpp.reports.step.path_line import path_pieces
from lightning_gpp.reports.step.picture_rows import NUMBER_PT, VERSION_PT, Rows
from lightning_gpp.simulate.timeline.shares import shares
from lightning_gpp.simulate.timeline.span import Span
from lightning_gpp.simulate.timeline.timeline import Timeline
from lightning_gpp.simulate.timeline.versions import met_by_backwards, version_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patheffects import AbstractPathEffect

LEFT_IN = 1.45
TEXT_PT = 10.0
DIGIT_WIDTH = 0.64
"""Width of a digit in units of the font size."""
PATH_DEPTH = 0.84
"""Where in a lane the critical path goes, in parts of its height."""


def draw_timeline(timeline: Timeline, rows: Rows, axes: Axes, until_s: float) -> None:
    """Draws the rows into axes; x is milliseconds, y inches from the top.

    The bars of one colour in one row or lane are one collection, whose gid is
    ``"<legend>/<rank>/<stage or row>"``. The critical path is a collection
    ``"path"``, with ``"path jumps"`` between its parts.

    Args:
        timeline: what is drawn.
        rows: where.
        axes: to draw into.
        until_s: the end of the axis.
    """
    axes.set_xlim(0, max(until_s, 1e-9) * 1e3)
    axes.set_ylim(rows.height_in, 0)
    for top, height in rows.row.values():
        axes.broken_barh([(0, timeline.step_s * 1e3)], (top, height), facecolor=IDLE_COLOUR)
    for paint in PAINTS:
        _draw_bars(timeline, rows, paint, axes)
    _draw_numbers(timeline, rows, axes)
    _draw_path(timeline, rows, axes)
    _draw_names(timeline, rows, axes)
    if timeline.num_minibatches == 1:
        _draw_minibatches(timeline, axes)
    style_axes(axes)


def style_axes(axes: Axes) -> None:
    """Time below, thin lines upwards, no frame."""
    axes.tick_params(axis="x", labelsize=TEXT_PT - 1)
    axes.set_yticks([])
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "left", "right"]].set_visible(False)


def _draw_bars(timeline: Timeline, rows: Rows, paint: Paint, axes: Axes) -> None:
    bars: dict[tuple[str, float, float], list[tuple[float, float]]] = {}
    for span in timeline.spans:
        if span.kind in paint.kinds:
            top, height = rows.place(span, paint)
            place = span.stage if paint.in_lane and span.stage in rows.lane else "row"
            gid = f"{paint.legend}/{span.rank}/{place}"
            bars.setdefault((gid, top, height), []).append(
                (span.start_s * 1e3, span.duration_s * 1e3)
            )
    edge_pt = min(0.4, rows.lane_in)
    for (gid, top, height), ranges in bars.items():
        edge = {"edgecolor": "white", "linewidth": edge_pt} if paint.in_lane else {"linewidth": 0}
        axes.broken_barh(ranges, (top, height), facecolor=paint.colour, gid=gid, zorder=2, **edge)


def _draw_numbers(timeline: Timeline, rows: Rows, axes: Axes) -> None:
    """The micro-batch of every bar and, where these overlap, which weights there were then."""
    met = met_by_backwards(timeline)
    points_per_s = _points_per_s(axes)
    for span, paint in _numbered(timeline, rows, points_per_s):
        versions = version_text(span, met)
        is_wide = span.duration_s * points_per_s >= _width_pt(versions, VERSION_PT)
        middle = 0.42 if timeline.critical_path else 0.5
        lines = [(str(span.microbatch), NUMBER_PT, middle)]
        if versions and is_wide and rows.has_versions:
            lines = [(str(span.microbatch), NUMBER_PT, 0.24), (versions, VERSION_PT, 0.58)]
        top, height = rows.place(span, paint)
        for text, size_pt, part in lines:
            axes.text(
                (span.start_s + span.end_s) / 2 * 1e3,
                top + height * part,
                text,
                size=size_pt,
                color=paint.text,
                ha="center",
                va="center_baseline",
                zorder=5,
                path_effects=around(paint.colour, 2.0),
            )


def around(colour: str, width_pt: float) -> list[AbstractPathEffect]:
    """A rim around a text or a line, so that it is seen on whatever is behind it."""
    from matplotlib.patheffects import Normal, Stroke

    return [Stroke(linewidth=width_pt, foreground=colour), Normal()]


def _numbered(timeline: Timeline, rows: Rows, points_per_s: float) -> Iterator[tuple[Span, Paint]]:
    """The spans whose bars are large enough for the number of their micro-batch."""
    if not rows.has_numbers:
        return
    for paint in PAINTS:
        if paint.in_lane:
            for span in timeline.spans:
                needed_pt = _width_pt(str(span.microbatch), NUMBER_PT)
                if span.kind in paint.kinds and span.duration_s * points_per_s >= needed_pt:
                    yield span, paint


def _points_per_s(axes: Axes) -> float:
    width_in = axes.get_position().width * axes.figure.get_figure(root=True).get_figwidth()
    return float(width_in * 72 * 1e3 / axes.get_xlim()[1])


def _width_pt(text: str, size_pt: float) -> float:
    """How wide a text of digits is, with some room."""
    return (len(text) + 0.5) * DIGIT_WIDTH * size_pt


def _draw_path(timeline: Timeline, rows: Rows, axes: Axes) -> None:
    """Black lines with a white rim, so that they are seen on every colour; thin ones between."""
    from matplotlib.collections import LineCollection

    along: list[tuple[tuple[float, float], ...]] = []
    for piece in path_pieces(timeline):
        top, height = rows.row[piece.rank]
        if piece.span is not None:
            top, height = rows.place(piece.span, PAINT_OF[piece.span.kind])
        y = top + PATH_DEPTH * height
        along.append(((piece.start_s * 1e3, y), (piece.end_s * 1e3, y)))
    if not along:
        return
    between = [(one[1], other[0]) for one, other in zip(along, along[1:]) if one[1] != other[0]]
    width_pt = min(2.4, max(0.9, rows.lane_in * 72 * 0.16))
    for lines, name, points in ((between, "path jumps", width_pt / 2), (along, "path", width_pt)):
        is_thin = lines is between and not rows.has_numbers
        axes.add_collection(
            LineCollection(
                lines,
                colors=PATH_COLOUR,
                linewidths=0.5 if is_thin else points,
                alpha=0.6 if is_thin else 1.0,
                capstyle="projecting",
                zorder=4,
                gid=name,
                path_effects=None if is_thin else around("white", points + min(1.6, width_pt)),
                clip_on=False,
            ),
            autolim=False,
        )


def _draw_names(timeline: Timeline, rows: Rows, axes: Axes) -> None:
    """Ranks and stages at the left, bubble shares at the right."""
    write = RowTexts(axes, rows)
    for rank, (top, height) in rows.row.items():
        if rank % rows.every == 0:
            write.far_left(top + height / 2, f"rank {rank}")
    for stage, (top, height) in rows.lane.items():
        if timeline.stages[stage].rank % rows.every == 0:
            write.left(top + height / 2, timeline.stages[stage].title)
    write.head("bubble")
    for rank, found in enumerate(shares(timeline).ranks):
        if rank % rows.every == 0:
            top, height = rows.row[rank]
            write.right(top + height / 2, percent_text(found.bubble_share, 1))


class RowTexts:
    """Writes beside the rows of axes."""

    def __init__(self, axes: Axes, rows: Rows) -> None:
        self._axes = axes
        self._size = rows.text_pt

    def far_left(self, y: float, text: str) -> None:
        """Where ranks are named."""
        self._write(0, y, text, -LEFT_IN + 0.15, ha="left")

    def left(self, y: float, text: str) -> None:
        """Where stages are named, close to the rows."""
        self._write(0, y, text, -0.1, ha="right", color="#444444")

    def right(self, y: float, text: str) -> None:
        """Behind the rows."""
        self._write(1, y, text, 0.1, ha="left")

    def head(self, text: str) -> None:
        """Above what is behind the rows."""
        self._write(1, 0, text, 0.1, 0.04, size=TEXT_PT - 1, va="bottom", color="#444444")

    def _write(
        self, x: float, y: float, text: str, right_in: float, up_in: float = 0.0, **style: object
    ) -> None:
        from matplotlib.transforms import offset_copy

        figure = self._axes.figure.get_figure(root=True)
        beside = self._axes.get_yaxis_transform()
        place = offset_copy(beside, figure, x=right_in, y=up_in, units="inches")
        look = {"size": self._size, "va": "center_baseline"} | style
        self._axes.text(x, y, text, transform=place, **look)  # type: ignore[arg-type]


def _draw_minibatches(timeline: Timeline, axes: Axes) -> None:
    """A line where each further mini-batch of an accumulated step begins."""
    starts: dict[int, float] = {}
    for span in timeline.spans:
        if span.minibatch:
            known_s = starts.get(span.minibatch, span.start_s)
            starts[span.minibatch] = min(known_s, span.start_s)
    for start_s in starts.values():
        axes.axvline(start_s * 1e3, color="black", linewidth=1, linestyle="--", zorder=3)
