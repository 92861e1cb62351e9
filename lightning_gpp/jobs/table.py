"""One table of a job: rows of named values, as text, JSON and CSV."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_gpp.common.text_table import text_table
from lightning_gpp.jobs.files import save_json

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
    dropped: Sequence[str] = (),
    max_width: int = 100,
) -> str:
    """The rows as text, without columns that say nothing.

    Args:
        rows: of the table.
        columns: header -> what its cells say.
        left: columns whose cells stand at the left.
        flexible: the column whose text may take several lines.
        dropped: columns that are left out where the terminal is narrow, the least important first.
        max_width: columns of the terminal.
    """
    cells = {header: [write(row) for row in rows] for header, write in columns.items()}
    shown = {header: texts for header, texts in cells.items() if any(texts)}
    for number in range(len(dropped) + 1):
        kept = {header: t for header, t in shown.items() if header not in dropped[:number]}
        table = text_table(
            [*kept],
            [list(row) for row in zip(*kept.values(), strict=True)],
            left=left,
            flexible=flexible if flexible in kept else None,
            max_width=max_width,
        )
        if max(map(len, table.split("\n"))) <= max_width:
            break
    return table


def save_rows(rows: Sequence[Row], folder: Path, name: str, first: Iterable[str] = ()) -> None:
    """Writes ``NAME.json`` and ``NAME.csv``; see :func:`save_csv`."""
    save_json(rows, folder / f"{name}.json")
    save_csv(rows, folder / f"{name}.csv", first)


def save_csv(rows: Sequence[Row], path: Path, first: Iterable[str] = ()) -> None:
    """Writes rows; a value that is a mapping has a column for every key.

    Args:
        rows: of the table.
        path: of the file.
        first: columns before the others.
    """
    flat = [_flat(row) for row in rows]
    header = list(dict.fromkeys([*first, *(column for row in flat for column in row)]))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, header, restval="")
        writer.writeheader()
        writer.writerows(flat)


def _flat(row: Row) -> dict[str, Any]:
    plain = {name: value for name, value in row.items() if not isinstance(value, Mapping)}
    for value in row.values():
        plain |= value if isinstance(value, Mapping) else {}
    return plain
