"""Writes all that shows a step: a picture, a page, a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_gpp.reports.step.page import write_page
from lightning_gpp.reports.step.picture import write_picture
from lightning_gpp.reports.step.trace import write_trace
from lightning_gpp.simulate.timeline.timeline import Timeline


def write_step(
    timelines: Sequence[Timeline],
    folder: Path,
    *,
    suffix: str = "",
    picture: bool = True,
    page: bool = True,
    trace: bool = True,
) -> list[Path]:
    """Writes ``timeline.png``, ``timeline.html`` and ``trace.json`` of the same timelines.

    Args:
        timelines: from the top to the bottom, e.g. the predicted and the measured step.
        folder: where to; it exists.
        suffix: added to the names of the files.
        picture: whether to write the picture.
        page: whether to write the page.
        trace: whether to write the trace.

    Returns:
        What was written.
    """
    written = []
    if picture:
        written.append(folder / f"timeline{suffix}.png")
        write_picture(timelines, written[-1])
    if page:
        written.append(folder / f"timeline{suffix}.html")
        write_page(timelines, written[-1])
    if trace:
        written.append(folder / f"trace{suffix}.json")
        write_trace(timelines, written[-1])
    return written
