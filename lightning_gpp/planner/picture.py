"""A picture of a stage graph in text: boxes in layers by depth, edges with their sizes.

    ┌────────────────────────────┐
    │            stem            │
    └─────┬───────────────┬──────┘
          │ 4.0 kB        │ 4.0 kB
    ┌─────▼──────┐ ┌──────▼──────┐
    │  encoder a │ │  encoder b  │
    └─────┬──────┘ └──────┬──────┘
          │ 1.0 kB        │ 1.0 kB
    ┌─────▼───────────────▼──────┐
    │           fusion           │
    └────────────────────────────┘
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from lightning_gpp.graph import FEED, StageGraph
from lightning_gpp.planner.picture_layout import Item, Layout, Segment, edge_of, lay_out
from lightning_gpp.planner.units_of_measure import bytes_text

TEXT_WIDTHS = (40, 32, 26, 22, 18, 15, 12, 10)
"""Widths to which the text in the boxes is wrapped, until the picture is narrow enough."""

_UP, _DOWN, _LEFT, _RIGHT = 1, 2, 4, 8
_LINES = {
    _UP | _DOWN: "│",
    _LEFT | _RIGHT: "─",
    _DOWN | _RIGHT: "┌",
    _DOWN | _LEFT: "┐",
    _UP | _RIGHT: "└",
    _UP | _LEFT: "┘",
    _UP | _DOWN | _RIGHT: "├",
    _UP | _DOWN | _LEFT: "┤",
    _DOWN | _LEFT | _RIGHT: "┬",
    _UP | _LEFT | _RIGHT: "┴",
    _UP | _DOWN | _LEFT | _RIGHT: "┼",
}
_ASCII = str.maketrans("│─┌┐└┘├┤┬┴┼▼┊…", "|-++++++++++v:.".replace("+++++++++++", "++++++++++")[:15])


def draw_stage_graph(
    stages: StageGraph, labels: Sequence[str], *, max_width: int = 100, ascii_only: bool = False
) -> str:
    """Draws a stage graph; data flow from top to bottom, stages of one depth are side by side.

    Crossing lines (``┼``) do not meet. Gradients flow back along all edges but dotted ones. Where
    the picture would be too wide, boxes carry only the stage ids and the rest is listed below it.

    Args:
        stages: the stage graph.
        labels: what to write into the box of each stage; may have several lines.
        max_width: columns of the terminal.
        ascii_only: draw with ASCII characters.
    """
    text = _draw(stages, labels, max_width)
    return text.translate(_ASCII) if ascii_only else text
