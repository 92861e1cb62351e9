"""A step as one HTML page that can be zoomed, for any browser and without a network.

The page holds its data, its style and its script (the files of ``page_files``) and asks for nothing
else; a content security policy in it forbids every request.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from lightning_gpp.reports.step.page_data import page_data
from lightning_gpp.simulate.timeline.timeline import Timeline

SCRIPTS = ("layout", "draw", "hover", "input")
"""Files of the script, in this order."""


def write_page(timelines: Timeline | Sequence[Timeline], path: Path) -> None:
    """Writes the page of a timeline, or of several one above the other on one time axis."""
    path.write_text(page_html(timelines), encoding="utf-8")


def page_html(timelines: Timeline | Sequence[Timeline]) -> str:
    """The text of the page.

    Raises:
        ValueError: there is no timeline.
    """
    shown = (timelines,) if isinstance(timelines, Timeline) else tuple(timelines)
    data = page_data(shown)
    parts = {
        "title": html.escape(" and ".join(timeline["title"] for timeline in data["timelines"])),
        "data": script_json(data),
        "script": "\n".join(_file(f"{name}.js") for name in SCRIPTS),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _file("page.html"))


def script_json(data: object) -> str:
    r"""JSON that can stand in a ``<script>`` element, whatever its texts are.

    >>> script_json("</script><!--")
    '"\\u003c/script\\u003e\\u003c!--"'
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _file(name: str) -> str:
    file = files("lightning_gpp.reports.step") / "page_files" / name
    return file.read_text(encoding="utf-8")
