"""Rows of a text table, with the one error that says what is wrong with it and where."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path


def broken(path: Path, line: int, column: str, got: str, expected: str) -> ValueError:
    """The error for one place of a file.

    >>> broken(Path("a.csv"), 3, "age", "'old'", "a number")
    ValueError("a.csv, line 3, column age: got 'old', expected a number")
    """
    return ValueError(f"{path}, line {line}, column {column}: got {got}, expected {expected}")


def no_samples(path: Path) -> ValueError:
    """The error for a table without a row of data."""
    return ValueError(f"{path} holds no sample, expected at least one row of data")


def number(text: str, path: Path, line: int, column: str) -> float:
    """A finite number of a file.

    Raises:
        ValueError: it is none; names the place.
    """
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < float("inf"):
        raise broken(path, line, column, repr(text), "a number")
    return value


def text_rows(path: Path, delimiter: str, remedy: str) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of every row of a file that is not blank, white space stripped.

    Args:
        path: the file.
        delimiter: between fields.
        remedy: how to do without the file, for the error message.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is empty or no text.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; {remedy}")
    line = 0
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter)
        try:
            for fields in reader:
                line = reader.line_num
                if fields:
                    yield line, [text.strip() for text in fields]
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(
                f"{path}, after line {line}: {error}; expected a text table in UTF-8"
            ) from error
    if line == 0:
        raise ValueError(f"{path} is empty, expected a table")


def check_width(fields: Sequence[str], names: Sequence[str], path: Path, line: int) -> None:
    """Raises ValueError when a row has not one field per column; names the first one wrong."""
    if len(fields) == len(names):
        return
    wrong = names[len(fields)] if len(fields) < len(names) else f"after {names[-1]}"
    raise broken(path, line, wrong, f"{len(fields)} fields", f"{len(names)}, one per column")
