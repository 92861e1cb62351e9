"""Writes all that shows a step: a picture, a page, a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_gpp.reports.step.page import write_page
from lightning_gpp.reports.step.picture import write_picture
from lightning_gpp.reports.step.trace import write_trace
from lightning_gpp.simulate.timeline.timeline import Timeline

WRITERS = {
    "picture": (write_picture, "timeline{}.png"),
    "page": (write_page, "timeline{}.html"),
    "trace": (write_trace, "trace{}.json"),
}


def write_step(
    timelines: Sequence[Timeline], folder: Path, *, suffix: str = "", **wanted: bool
) -> list[Path]:
    """Writes ``timeline.png``, ``timeline.html`` and ``trace.json`` of the same timelines.

    Args:
        timelines: from the top to the bottom, e.g. the predicted and the measured step.
        folder: where to; it exists.
        suffix: added to the names of the files.
        wanted: whether to write ``picture``, ``page`` and ``trace``; all by default.

    Returns:
        What was written.
    """
    written = []
    for kind, (write, name) in WRITERS.items():
        if wanted.get(kind, True):
            written.append(folder / name.format(suffix))
            write(timelines, written[-1])
    return written
