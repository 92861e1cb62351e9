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

import re
from collections.abc import Mapping, Sequence

from lightning_gpp.common.units_of_measure import bytes_text
from lightning_gpp.graph import FEED, StageGraph
from lightning_gpp.reports.plan.picture_layout import (
    EdgeSegment,
    Item,
    PictureLayout,
    edge_of,
    lay_out,
)

TEXT_WIDTHS = (40, 32, 26, 22, 18, 15, 12, 10)
"""Widths to which the text in the boxes is wrapped, until the picture is narrow enough."""

_GLUE = re.compile(r"(?<=\d) (?=[kMGT]?B\b|[mu]?s\b|%)|(?<=stage|evice|vices) (?=\d)| (?=\(\d+\))")
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
_ASCII = str.maketrans(
    {**dict.fromkeys("┌┐└┘├┤┬┴┼", "+"), "│": "|", "─": "-", "▼": "v", "┊": ":", "…": ".", "·": "|"}
)


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
    text = _picture(stages, labels, max_width) or _list(stages, labels)
    return text.translate(_ASCII) if ascii_only else text


def _picture(stages: StageGraph, labels: Sequence[str], max_width: int) -> str | None:
    feeds = {e.target: f"feed {bytes_text(e.size_bytes)}" for e in stages.edges if e.source == FEED}
    sizes = {(e.source, e.target): bytes_text(e.size_bytes) for e in stages.edges}
    full = [f"{label}\n{feeds.get(i, '')}".strip() for i, label in enumerate(labels)]
    depths = list(stages.depths.values())
    for text_width in TEXT_WIDTHS:
        # A stage that is alone in its layer has room.
        widths = [TEXT_WIDTHS[0] if depths.count(d) == 1 else text_width for d in depths]
        boxes = [_wrapped(label, width) for label, width in zip(full, widths)]
        if text := _drawn(stages, boxes, sizes, max_width):
            return text
    ids = [[str(stage)] for stage in range(stages.num_stages)]
    text = _drawn(stages, ids, {}, max_width)
    return f"{text}\n\n{_list(stages, labels)}" if text else None


def _drawn(
    stages: StageGraph,
    boxes: Sequence[Sequence[str]],
    sizes: Mapping[tuple[int, int], str],
    max_width: int,
) -> str | None:
    """The picture, or None where it is too wide."""
    layout = lay_out(
        stages,
        box_width=[max(map(len, lines)) + 4 for lines in boxes],
        label_width={edge: len(text) for edge, text in sizes.items()},
    )
    ends = [layout.top[s] + len(sizes.get(edge_of(s), "")) + 2 for g in layout.segments for s in g]
    if max([layout.width, *ends]) > max_width:
        return None
    dotted = {(e.source, e.target) for e in stages.edges if not e.has_backward}
    return _Canvas(layout, boxes, sizes, dotted).text()


def _list(stages: StageGraph, labels: Sequence[str]) -> str:
    """The stage graph as a list, for what no terminal is wide enough for."""
    lines = []
    for stage, label in enumerate(labels):
        sources = ", ".join(
            f"{'feed' if edge.source == FEED else edge.source} ({bytes_text(edge.size_bytes)})"
            for edge in stages.edges
            if edge.target == stage
        )
        lines.append(
            f"{stage}: {' | '.join(label.splitlines())}{' <- ' if sources else ''}{sources}"
        )
    return "\n".join(lines)


def _wrapped(label: str, width: int) -> list[str]:
    """The lines of a label, none longer than ``width``; numbers stay with their units."""
    lines: list[str] = []
    for line in label.splitlines() or [""]:
        glued = _GLUE.sub("\N{NO-BREAK SPACE}", line.strip())
        words = [piece for word in glued.split(" ") for piece in _pieces(word, width)]
        current = ""
        for word in words:
            if current and len(current) + 1 + len(word) > width:
                lines.append(current)
                current = word
            else:
                current = f"{current} {word}".lstrip(" ")
        lines.append(current)
    return [line.replace("\N{NO-BREAK SPACE}", " ").strip(" ·") for line in lines]


def _pieces(word: str, width: int) -> list[str]:
    """A word cut where it is too long, after a dot or an underscore if there is one."""
    pieces = []
    while len(word) > width:
        end = 1 + max(word.rfind(mark, 1, width - 1) for mark in "._")
        end = end if end > 1 else width
        pieces.append(word[:end])
        word = word[end:]
    return [*pieces, word]


class _Canvas:
    """Characters by row and column; lines are joined where they meet."""

    def __init__(
        self,
        layout: PictureLayout,
        boxes: Sequence[Sequence[str]],
        sizes: Mapping[tuple[int, int], str],
        dotted: set[tuple[int, int]],
    ) -> None:
        self._layout = layout
        self._lines: dict[tuple[int, int], int] = {}
        self._characters: dict[tuple[int, int], str] = {}
        self._dotted = dotted
        row = 0
        for index, layer in enumerate(layout.layers):
            height = 2 + max(len(boxes[item.stage]) for item in layer if item.target is None)
            for item in layer:
                if item.target is None:
                    self._box(item, row, height, boxes[item.stage])
                else:
                    self._wire(layout.left[item], row, row + height - 1, (item.stage, item.target))
            row += height
            if index < len(layout.segments):
                row = self._gap(layout.segments[index], row, sizes)
        self._num_rows = row

    def text(self) -> str:
        """The lines of the picture."""
        cells = {place: _LINES.get(mask, " ") for place, mask in self._lines.items()}
        cells |= self._characters
        width = 1 + max(column for _, column in cells)
        rows = (
            "".join(cells.get((r, c), " ") for c in range(width)) for r in range(self._num_rows)
        )
        return "\n".join(row.rstrip() for row in rows)

    def _box(self, item: Item, row: int, height: int, lines: Sequence[str]) -> None:
        left, right = self._layout.left[item], self._layout.right[item]
        for border in (row, row + height - 1):
            self._line(border, left, border, right)
        for border in (left, right):
            self._line(row, border, row + height - 1, border)
        first = row + 1 + (height - 2 - len(lines)) // 2
        for offset, line in enumerate(lines):
            self._write(first + offset, left + 1 + (right - left - 1 - len(line)) // 2, line)

    def _gap(
        self, gap: Sequence[EdgeSegment], row: int, sizes: Mapping[tuple[int, int], str]
    ) -> int:
        """Draws the segments below a layer; returns the first row after them."""
        layout = self._layout
        bent = _tracks([s for s in gap if layout.top[s] != layout.bottom[s]], layout)
        end = row + 1 + (len(bent) + 1 if bent else 0)
        for segment in gap:
            edge = edge_of(segment)
            top, bottom = layout.top[segment], layout.bottom[segment]
            track = row + 1 + bent.index(segment) if segment in bent else end
            self._wire(top, row - 1, track, edge)
            if segment in bent:
                self._line(track, top, track, bottom)
                self._wire(bottom, track, end, edge)
            if segment.upper.target is None:
                self._write(row, top + 2, sizes.get(edge, ""))
            if segment.lower.target is None:
                self._write(end, bottom, "▼")
        return end

    def _wire(self, column: int, first: int, last: int, edge: tuple[int, int]) -> None:
        self._line(first, column, last, column)
        if edge in self._dotted:
            for row in range(first + 1, last):
                if self._lines[row, column] == _UP | _DOWN:
                    self._characters[row, column] = "┊"

    def _line(self, row: int, column: int, last_row: int, last_column: int) -> None:
        """A straight line; both ends reach to the middle of their cells."""
        if row == last_row:
            low, high = sorted((column, last_column))
            for place in range(low, high):
                self._join((row, place), _RIGHT)
                self._join((row, place + 1), _LEFT)
        else:
            for place in range(row, last_row):
                self._join((place, column), _DOWN)
                self._join((place + 1, column), _UP)

    def _join(self, place: tuple[int, int], direction: int) -> None:
        self._lines[place] = self._lines.get(place, 0) | direction

    def _write(self, row: int, column: int, text: str) -> None:
        for offset, character in enumerate(text):
            self._characters[row, column + offset] = character


def _tracks(bent: Sequence[EdgeSegment], layout: PictureLayout) -> list[EdgeSegment]:
    """Bent segments from the upper to the lower row in which they run to the side.

    One that ends below another's start has to let that one leave the column first.
    """
    order: list[EdgeSegment] = []
    waiting = sorted(bent, key=lambda s: -layout.top[s])
    while waiting:
        starts = {layout.top[s]: s for s in waiting}
        free = [s for s in waiting if starts.get(layout.bottom[s], s) is s]
        order.append((free or waiting)[0])
        waiting.remove(order[-1])
    return order
