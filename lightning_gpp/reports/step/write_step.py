"""Writes all that shows a step: a picture and a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_gpp.reports.step.page import write_page
from lightning_gpp.reports.step.picture import write_picture
from lightning_gpp.simulate.timeline.timeline import Timeline


def write_step(
    timelines: Sequence[Timeline],
    folder: Path,
    *,
    picture: bool = True,
    page: bool = True,
) -> list[Path]:
    """Writes ``timeline.png`` and ``timeline.html`` of the same timelines.

    Args:
        timelines: from the top to the bottom, e.g. the predicted and the measured step.
        folder: where to; it exists.
        picture: whether to write the picture.
        page: whether to write the page.

    Returns:
        What was written.
    """
    written = []
    for is_wanted, write, ending in ((picture, write_picture, "png"), (page, write_page, "html")):
        if is_wanted:
            written.append(folder / f"timeline.{ending}")
            write(timelines, written[-1])
    return written
