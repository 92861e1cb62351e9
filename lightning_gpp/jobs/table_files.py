"""Rows of a job's table as JSON and CSV, and cells of what is not always known."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_gpp.jobs.files import save_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def save_rows(
    rows: Sequence[DataclassInstance], folder: Path, name: str, first: Iterable[str] = ()
) -> None:
    """Writes ``NAME.json`` and ``NAME.csv``; numbers are in seconds, bytes and samples.

    Args:
        rows: of the table. A field that is a mapping has a column of the CSV for every key.
        folder: of the files.
        name: of the files.
        first: columns of the CSV before the others.
    """
    plain = [asdict(row) for row in rows]
    save_json(plain, folder / f"{name}.json")
    flat = [_flat(row) for row in plain]
    header = list(dict.fromkeys([*first, *(column for row in flat for column in row)]))
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, header, restval="")
        writer.writeheader()
        writer.writerows(flat)


def _flat(row: Mapping[str, object]) -> dict[str, object]:
    nested = [value for value in row.values() if isinstance(value, Mapping)]
    plain = {name: value for name, value in row.items() if not isinstance(value, Mapping)}
    return plain | {name: value for one in nested for name, value in one.items()}


def cell(value: float | None, write: Callable[..., str]) -> str:
    """A value as text; empty where it is not known."""
    return "" if value is None else write(value)
