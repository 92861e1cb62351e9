"""Tables of aligned columns and sentences that fit a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence

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
    below: list[list[str]] = [[] for _ in rows]
    if flexible is not None:
        place = list(header).index(flexible)
        others = [[*row[:place], *row[place + 1 :]] for row in (header, *rows)]
        taken = sum(_width(column) + COLUMN_GAP for column in zip(*others, strict=True))
        texts = [row[place] for row in rows]
        wanted = max(map(len, (flexible, *texts)))
        room = min(wanted, max_width - taken)
        longest = max((len(word) for text in texts for word in text.split()), default=0)
        is_wide = room >= max(len(flexible), min(wanted, NARROWEST), longest)
        cells = [textwrap.wrap(text, room) for text in texts] if is_wide else []
        if is_wide and max(map(len, cells), default=0) <= MOST_LINES:
            rows = [
                [*row[:place], "\n".join(cell), *row[place + 1 :]]
                for row, cell in zip(rows, cells, strict=True)
            ]
        else:
            header, *rows = others
            wrap = textwrap.TextWrapper(max_width, initial_indent="    ", subsequent_indent="    ")
            below = [wrap.wrap(text) for text in texts]
    widths = [_width(column) for column in zip(header, *rows)]

    def lines(cells: Sequence[str], *, is_head: bool = False) -> Iterator[str]:
        split = [cell.split("\n") for cell in cells]
        height = max(map(len, split))
        for row in range(height):
            parts = []
            for name, lines, width in zip(header, split, widths):
                number = row - (height - len(lines) if is_head else 0)
                text = lines[number] if 0 <= number < len(lines) else ""
                parts.append(text.ljust(width) if name in left else text.rjust(width))
            yield (" " * COLUMN_GAP).join(parts).rstrip()

    rule = "─" * (sum(widths) + COLUMN_GAP * (len(widths) - 1))
    body = (line for row, texts in zip(rows, below) for line in (*lines(row), *texts))
    return "\n".join([*lines(header, is_head=True), rule, *body])


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


def _width(cells: Sequence[str]) -> int:
    return max(len(line) for cell in cells for line in cell.split("\n"))
