"""Tables of aligned columns and sentences that fit a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence

COLUMN_GAP = 2
NARROWEST = 12
"""A column that takes several rows is not made narrower than this, nor than its longest word; its
text goes below the row."""

MOST_LINES = 5
"""A text that would take more lines than these in its column goes below the row."""


def text_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[str] = (),
    flexible: str | None = None,
    max_width: int = 100,
) -> str:
    """A table with a rule below its header.

    Args:
        header: names of the columns; one may have several lines.
        rows: cells of every row.
        left: columns whose cells stand at the left; the others at the right.
        flexible: a column whose text may take several lines, or the place below the row where the
            terminal is narrow.
        max_width: columns of the terminal.

    >>> print(text_table(["stage", "holds"], [["0", "stem"], ["10", "head"]], left=["holds"]))
    stage  holds
    ────────────
        0  stem
       10  head
    """
    if flexible is None:
        return _lines(header, [[row] for row in rows], left)
    place = list(header).index(flexible)
    others = [_without(row, place) for row in (header, *rows)]
    taken = sum(_width(column) + COLUMN_GAP for column in zip(*others, strict=True))
    wanted = max(len(cell) for cell in (flexible, *(row[place] for row in rows)))
    room = min(wanted, max_width - taken)
    if room >= max(len(flexible), min(wanted, NARROWEST), _longest_word(rows, place)):
        groups = [_wrapped_row(row, place, room) for row in rows]
        if max(map(len, groups), default=0) <= MOST_LINES:
            return _lines(header, groups, left)
    indent = " " * 4
    below = [
        textwrap.wrap(row[place], max_width, initial_indent=indent, subsequent_indent=indent)
        for row in rows
    ]
    groups = [[_without(row, place)] for row in rows]
    return _lines(_without(header, place), groups, left, below)


def wrapped(lines: Iterable[str], max_width: int) -> str:
    """Sentences, each from a line of its own on; the lines that it goes on in are indented.

    >>> print(wrapped(["One goes on and on.", "Two."], max_width=12))
    One goes on
      and on.
    Two.
    """
    return "\n".join(
        textwrap.fill(line, max_width, subsequent_indent="  ", break_on_hyphens=False)
        for line in lines
    )


def _without(row: Sequence[str], place: int) -> list[str]:
    return [cell for index, cell in enumerate(row) if index != place]


def _longest_word(rows: Sequence[Sequence[str]], place: int) -> int:
    return max((len(word) for row in rows for word in row[place].split()), default=0)


def _width(cells: Sequence[str]) -> int:
    return max(len(line) for cell in cells for line in cell.split("\n"))


def _wrapped_row(row: Sequence[str], place: int, room: int) -> list[list[str]]:
    """A row, and the rows that a long text goes on in."""
    first, *more = textwrap.wrap(row[place], room) or [""]
    head = [cell if index != place else first for index, cell in enumerate(row)]
    return [head, *(["" if i != place else line for i in range(len(row))] for line in more)]


def _lines(
    header: Sequence[str],
    groups: Sequence[Sequence[Sequence[str]]],
    left: Collection[str],
    below: Sequence[Sequence[str]] | None = None,
) -> str:
    """The table of rows in groups, with lines of text below each of these."""
    heads = [name.split("\n") for name in header]
    height = max(map(len, heads))
    above = [[""] * (height - len(lines)) + lines for lines in heads]
    top = [[lines[row] for lines in above] for row in range(height)]
    widths = [_width(cells) for cells in zip(*top, *(row for rows in groups for row in rows))]
    rule = "─" * (sum(widths) + COLUMN_GAP * (len(widths) - 1))

    def line(cells: Sequence[str]) -> str:
        parts = (
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(header, cells, widths)
        )
        return (" " * COLUMN_GAP).join(parts).rstrip()

    lines = [*map(line, top), rule]
    for rows, texts in zip(groups, below or [()] * len(groups), strict=True):
        lines += [*map(line, rows), *texts]
    return "\n".join(lines)
