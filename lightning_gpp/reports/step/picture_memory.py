"""Draws the memory in use over a step: a small curve per rank, all on one scale."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lightning_gpp.common.units_of_measure import bytes_text
from lightning_gpp.reports.step.paint import ABOVE_COLOUR, IDLE_COLOUR, MEMORY_COLOUR
from lightning_gpp.reports.step.picture_rows import Rows
from lightning_gpp.reports.step.picture_step import RowTexts, style_axes
from lightning_gpp.simulate.timeline.timeline import MemoryCurve, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE_ROOM_IN = 0.12
"""In thinner rows there is no line for the limit."""
LIMIT_SHOWN = 2.0
"""A limit is drawn where it is at most so many times what is used; else it is only named."""


def draw_memory(timeline: Timeline, rows: Rows, axes: Axes, until_s: float) -> None:
    """Draws the curves into axes; x is milliseconds, y inches from the top.

    Args:
        timeline: whose memory.
        rows: of the ranks, without lanes of stages.
        axes: to draw into.
        until_s: the end of the axis.
    """
    axes.set_xlim(0, max(until_s, 1e-9) * 1e3)
    axes.set_ylim(rows.height_in, 0)
    full_bytes = _full_bytes(timeline)
    write = RowTexts(axes, rows)
    write.head("peak")
    for curve in timeline.memory:
        top, height = rows.row[curve.rank]
        axes.broken_barh([(0, timeline.step_s * 1e3)], (top, height), facecolor=IDLE_COLOUR)
        _draw_curve(curve, timeline.step_s, top, height / full_bytes, height, axes)
        if curve.rank % rows.every == 0:
            write.far_left(top + height / 2, f"rank {curve.rank}")
            write.right(top + height / 2, peak_text(curve))
    style_axes(axes)


def memory_text(timeline: Timeline, height_in: float) -> str:
    """What the curves are, and which marks there are on them in rows of this height."""
    marks = ""
    if any(_is_near(curve, timeline) for curve in timeline.memory) and height_in >= LINE_ROOM_IN:
        marks = "; the line is the limit"
    if any(curve.peak_bytes > (curve.limit_bytes or math.inf) for curve in timeline.memory):
        marks += "; red is above the limit"
    text = f"memory in use, {timeline.full_name}{marks}"
    return text[0].upper() + text[1:]


def peak_text(curve: MemoryCurve) -> str:
    """The peak, and how much there is.

    >>> peak_text(MemoryCurve(0, (0.0,), (3e9,), 16_000_000_000))
    '3.0 of 16.0 GB'
    """
    peak = bytes_text(curve.peak_bytes)
    if curve.limit_bytes is None:
        return peak
    limit = bytes_text(curve.limit_bytes)
    number, unit = peak.split()
    return f"{number} of {limit}" if limit.endswith(f" {unit}") else f"{peak} of {limit}"


def _full_bytes(timeline: Timeline) -> float:
    """What the height of a row stands for."""
    peak = max((curve.peak_bytes for curve in timeline.memory), default=0.0)
    limits = [curve.limit_bytes or 0 for curve in timeline.memory if _is_near(curve, timeline)]
    return 1.04 * max(1.0, peak, *limits)


def _is_near(curve: MemoryCurve, timeline: Timeline) -> bool:
    """Whether the limit of a rank is shown."""
    peak = max((curve.peak_bytes for curve in timeline.memory), default=0.0)
    return curve.limit_bytes is not None and curve.limit_bytes <= LIMIT_SHOWN * peak


def _draw_curve(
    curve: MemoryCurve, end_s: float, top: float, in_per_byte: float, height: float, axes: Axes
) -> None:
    if not curve.times_s:
        return
    bottom = top + height
    times_ms = [time_s * 1e3 for time_s in (*curve.times_s, end_s)]
    used = [*curve.used_bytes, curve.used_bytes[-1]]
    limit = max(used) if curve.limit_bytes is None else curve.limit_bytes
    within = [bottom - min(size, limit) * in_per_byte for size in used]
    above = [bottom - size * in_per_byte for size in used]
    look: dict[str, Any] = {"step": "post", "linewidth": 0, "zorder": 2}
    axes.fill_between(
        times_ms,
        within,
        bottom,
        color=MEMORY_COLOUR,
        gid=f"memory/{curve.rank}",
        **look,
    )
    if curve.peak_bytes > limit:
        gid = f"above the limit/{curve.rank}"
        axes.fill_between(times_ms, above, within, color=ABOVE_COLOUR, gid=gid, **look)
    near = curve.limit_bytes is not None and curve.limit_bytes * in_per_byte <= height
    if near and height >= LINE_ROOM_IN:
        y = bottom - limit * in_per_byte
        axes.hlines(y, 0, end_s * 1e3, colors="black", linewidth=0.8, zorder=3)
