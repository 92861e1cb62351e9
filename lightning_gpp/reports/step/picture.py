"""A step as a picture, or several of them (predicted and measured) one above the other.

Each timeline is a panel with a row per rank (``picture_step``), and below
it the memory in use where that is known; time goes to the right on one axis for all.

matplotlib is imported when a picture is made. Figures are made without pyplot and in matplotlib's
default style, so the user's figures, backend and style stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_gpp.reports.step.paint import IDLE_COLOUR, PAINTS, PATH_COLOUR
from lightning_gpp.reports.step.picture_memory import draw_memory, memory_text
from lightning_gpp.reports.step.picture_rows import Rows, lane_in
from lightning_gpp.reports.step.picture_step import LEFT_IN, TEXT_PT, draw_timeline
from lightning_gpp.reports.step.picture_text import (
    num_microbatches,
    path_text,
    stage_lines,
    subtitle,
    title,
    versions_text,
)
from lightning_gpp.simulate.timeline.timeline import Timeline, TimelineStage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
RIGHT_IN, RIGHT_OF_MEMORY_IN = 0.95, 1.70
TITLE_IN, LINE_IN, HEAD_IN = 0.30, 0.24, 0.24
TICKS_IN, AXIS_IN, LEGEND_IN, STAGE_LINE_IN = 0.40, 0.55, 0.35, 0.21
MEMORY_ROW = 0.7
"""Height of a row of memory in parts of a lane."""
TITLE_PT = 13.0
TOO_UNLIKE = 3.0
"""A step shorter by more than this factor has an axis of its own: on the other it is a stripe."""


def write_picture(timelines: Timeline | Sequence[Timeline], path: Path) -> None:
    """Writes a PNG of a timeline, or of several one above the other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = timeline_figure(timelines)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=DPI)


def timeline_figure(timelines: Timeline | Sequence[Timeline]) -> Figure:
    """The picture as a matplotlib figure, which belongs to no window and not to pyplot.

    Raises:
        ValueError: there is no timeline.
    """
    import matplotlib.style
    from matplotlib.figure import Figure

    shown = (timelines,) if isinstance(timelines, Timeline) else tuple(timelines)
    if not shown:
        raise ValueError("a picture needs at least one timeline, got none")
    page = _Page.of(shown)
    with matplotlib.style.context("default"):
        figure = Figure(figsize=(page.width_in, page.height_in), dpi=DPI, facecolor="white")
        for panel in page.panels:
            _draw_panel(figure, page, panel)
        _draw_legend(figure, page)
        _draw_stages(figure, page)
    return figure


@dataclass(frozen=True, slots=True)
class _Panel:
    """One set of rows and what is written above it.

    Attributes:
        timeline: what is shown.
        rows: where its rows are, from the top of the axes.
        lines: what is written above the rows; the first line is the title.
        is_memory: whether it shows memory.
        until_s: the end of its axis.
        top_in: inches from the top of the picture to its first line.
    """

    timeline: Timeline
    rows: Rows
    lines: tuple[str, ...]
    is_memory: bool
    until_s: float
    top_in: float = 0.0

    @property
    def head_in(self) -> float:
        """Height of what is above the rows."""
        return (0.1 if self.is_memory else TITLE_IN) + LINE_IN * len(self.lines)

    @property
    def axes_top_in(self) -> float:
        """Inches from the top of the picture to the rows."""
        return self.top_in + self.head_in

    @property
    def bottom_in(self) -> float:
        """Inches from the top of the picture to the end of its rows."""
        return self.axes_top_in + self.rows.height_in


@dataclass(frozen=True, slots=True)
class _Page:
    """The layout of a picture in inches."""

    panels: tuple[_Panel, ...]
    stages: tuple[tuple[str, ...], ...]
    width_in: float
    height_in: float
    right_in: float

    @classmethod
    def of(cls, timelines: Sequence[Timeline]) -> _Page:
        panels, top_in = [], 0.05
        for panel in _panels(timelines):
            panels.append(replace(panel, top_in=top_in))
            top_in = panels[-1].bottom_in + TICKS_IN
        stages = _stage_texts(timelines)
        return cls(
            panels=tuple(panels),
            stages=stages,
            width_in=max(_width_in(panel) for panel in panels),
            height_in=top_in + (AXIS_IN - TICKS_IN) + LEGEND_IN + STAGE_LINE_IN * len(stages) + 0.1,
            right_in=RIGHT_OF_MEMORY_IN if any(p.is_memory for p in panels) else RIGHT_IN,
        )

    def box(self, left_in: float, top_in: float, height_in: float) -> tuple[float, ...]:
        """(left, bottom, width, height) of axes in parts of the figure."""
        return (
            left_in / self.width_in,
            1 - (top_in + height_in) / self.height_in,
            (self.width_in - left_in - self.right_in) / self.width_in,
            height_in / self.height_in,
        )

    def y(self, top_in: float) -> float:
        """Height in parts of the figure."""
        return 1 - top_in / self.height_in


def _panels(timelines: Sequence[Timeline]) -> list[_Panel]:
    """The steps, and then their memory."""
    height_in = lane_in(timelines)
    measured = next((t for t in timelines if t.source != "predicted"), None)
    until_s, panels = _axes_until_s(timelines), []
    for timeline in timelines:
        lines = [title(timeline, measured), subtitle(timeline)]
        lines += [versions_text(timeline), path_text(timeline)]
        if until_s[timeline.full_name] < max(until_s.values()):
            lines[1] += "  ·  on a scale of its own"
        rows = Rows.of(timeline, height_in)
        found_s = until_s[timeline.full_name]
        panels.append(_Panel(timeline, rows, tuple(filter(None, lines)), False, found_s))
    for timeline in timelines:
        if timeline.memory:
            rows = Rows.of_ranks(timeline.num_ranks, height_in * MEMORY_ROW)
            lines = [memory_text(timeline, rows.lane_in)]
            found_s = until_s[timeline.full_name]
            panels.append(_Panel(timeline, rows, tuple(lines), True, found_s))
    return panels


def _axes_until_s(timelines: Sequence[Timeline]) -> dict[str, float]:
    """Where the axis of each timeline ends: of all at one moment, unless they are too unlike."""
    longest_s = max(timeline.step_s for timeline in timelines)
    return {
        timeline.full_name: timeline.step_s
        if timeline.step_s * TOO_UNLIKE < longest_s
        else longest_s
        for timeline in timelines
    }


def _draw_panel(figure: Figure, page: _Page, panel: _Panel) -> None:
    axes: Axes = figure.add_axes(page.box(LEFT_IN, panel.axes_top_in, panel.rows.height_in))  # type: ignore[arg-type]
    draw = draw_memory if panel.is_memory else draw_timeline
    draw(panel.timeline, panel.rows, axes, panel.until_s)
    if panel is page.panels[-1]:
        axes.set_xlabel("time since the step began (ms)", size=TEXT_PT)
    left, top_in = LEFT_IN / page.width_in, panel.top_in
    if not panel.is_memory:
        top_in += TITLE_IN
        figure.text(left, page.y(top_in), panel.lines[0], size=TITLE_PT, weight="bold")
    for line in panel.lines[0 if panel.is_memory else 1 :]:
        top_in += LINE_IN
        figure.text(left, page.y(top_in), line, size=TEXT_PT, color="#444444")


def _draw_legend(figure: Figure, page: _Page) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    timelines = [panel.timeline for panel in page.panels]
    present = {span.kind for timeline in timelines for span in timeline.spans if span.duration_s}
    handles: list[Patch | Line2D] = [
        Patch(facecolor=paint.colour, label=paint.legend)
        for paint in PAINTS
        if present.intersection(paint.kinds)
    ]
    handles.append(Patch(facecolor=IDLE_COLOUR, edgecolor="#BBBBBB", label="idle"))
    if any(timeline.critical_path for timeline in timelines):
        handles.append(Line2D([], [], color=PATH_COLOUR, linewidth=2.2, label="critical path"))
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(LEFT_IN / page.width_in, page.y(page.panels[-1].bottom_in + AXIS_IN)),
        ncols=len(handles),
        frameon=False,
        fontsize=TEXT_PT - 1,
        borderpad=0,
        borderaxespad=0,
        columnspacing=1.2,
        handlelength=1.3,
        handletextpad=0.5,
    )


def _draw_stages(figure: Figure, page: _Page) -> None:
    left = LEFT_IN / page.width_in
    top_in = page.panels[-1].bottom_in + AXIS_IN + LEGEND_IN
    for number, line in enumerate(page.stages):
        for column, text in enumerate(line):
            figure.text(
                left + column * (1 - left) / len(page.stages[0]),
                page.y(top_in + STAGE_LINE_IN * (number + 0.5)),
                text,
                size=TEXT_PT - 1,
                va="center",
                color="#222222",
            )


def _stage_texts(timelines: Sequence[Timeline]) -> tuple[tuple[str, ...], ...]:
    """The stages, once: those of the timeline that says most about them."""
    stages = max((timeline.stages for timeline in timelines), key=_length)
    columns = 1 if len(stages) <= 4 else 2 if len(stages) <= 16 else 3
    return tuple(map(tuple, stage_lines(stages, columns)))


def _length(stages: Sequence[TimelineStage]) -> int:
    return sum(len(stage.label) for stage in stages)


def _width_in(panel: _Panel) -> float:
    """Wider for more micro-batches, so that their numbers find room where they are written."""
    widest = 24.0 if panel.rows.has_numbers else 16.0
    return min(widest, max(12.0, 12.0 + 0.3 * (num_microbatches(panel.timeline) - 8)))
