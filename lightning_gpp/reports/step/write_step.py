"""Writes the picture and the page of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_gpp.reports.step.page import page_html
from lightning_gpp.reports.step.picture import DPI, timeline_figure
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
    png, html = folder / "timeline.png", folder / "timeline.html"
    if picture:
        timeline_figure(timelines).savefig(png, dpi=DPI)
    if page:
        html.write_text(page_html(timelines), encoding="utf-8")
    return [*[png] * picture, *[html] * page]
