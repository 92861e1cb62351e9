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
    files = (
        (picture, write_picture, f"timeline{suffix}.png"),
        (page, write_page, f"timeline{suffix}.html"),
        (trace, write_trace, f"trace{suffix}.json"),
    )
    written = []
    for is_wanted, write, name in files:
        if is_wanted:
            write(timelines, folder / name)
            written.append(folder / name)
    return written
