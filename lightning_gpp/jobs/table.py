"""A table of named values, as text, JSON and CSV."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_gpp.common.text_table import text_table

WIDEST, DEFAULT_WIDTH = 140, 100

Row = Mapping[str, Any]
"""Name -> value; None where it is not known. Seconds, bytes and samples."""

Cell = Callable[[Row], str]
"""The text of a row in a column."""


def console_width() -> int:
    """Columns of the terminal, no more than people read; 100 where there is none."""
    return min(shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns, WIDEST)


def cell(name: str, write: Callable[[Any], str] = str) -> Cell:
    """A value of the row as text; empty where it is not known."""
    return lambda row: "" if row.get(name) is None else write(row[name])


def describe_rows(
    rows: Sequence[Row],
    columns: Mapping[str, Cell],
    *,
    left: Collection[str] = (),
    flexible: str = "",
    max_width: int = 100,
) -> str:
    """The rows as text, without columns that say nothing.

    Args:
        rows: of the table.
        columns: header -> what its cells say.
        left: columns whose cells stand at the left.
        flexible: the column whose text may take several lines.
        max_width: columns of the terminal.
    """
    cells = {header: [write(row) for row in rows] for header, write in columns.items()}
    shown = {header: texts for header, texts in cells.items() if any(texts)}
    lines = [*zip(*shown.values(), strict=True)]
    where = flexible if flexible in shown else None
    return text_table([*shown], lines, left=left, flexible=where, max_width=max_width)


def save_csv(rows: Sequence[Row], path: Path, first: Iterable[str] = ()) -> None:
    """Writes rows; a value that is a mapping has a column for every key.

    Args:
        rows: of the table.
        path: of the file.
        first: columns before the others.
    """
    flat: list[dict[str, Any]] = []
    for row in rows:
        flat.append({})
        for name, value in row.items():
            flat[-1] |= value if isinstance(value, Mapping) else {name: value}
    header = dict.fromkeys([*first, *(column for row in flat for column in row)])
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*header], restval="")
        writer.writeheader()
        writer.writerows(flat)
