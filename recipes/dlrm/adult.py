"""UCI Adult: does a person earn more than 50,000 dollars a year?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..scale import Scale
from ..split import IntArray, stratified_split
from .data import ClickArrays, ClickData, ClickSplit, Features
from .rows import broken, check_width, no_samples, number, text_rows

NUMERIC = (
    "age",
    "fnlwgt",
    "education-num",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
)
CATEGORICAL = (
    "workclass",
    "education",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "native-country",
)
TARGET = "income-per-year"
CLASSES = {"<=50K": 0, ">50K": 1}
MISSING = ("", "?")
REMEDY = (
    "data.root (or LIGHTNING_GPP_DATA) must name the folder that holds adult/adult.csv, or train "
    "on generated clicks (data=clicks)"
)


class Adult(ClickData):
    """UCI Adult: 32,561 people, six numeric and eight categorical columns.

    Reads ``<root>/adult/adult.csv`` by the names in its first line. Numbers are scaled and
    categories numbered by the training samples; index 0 of every category is for what is missing
    (``?``) or was not among them. The split is stratified by class.

    Source: Becker and Kohavi (1996), https://doi.org/10.24432/C5XW20.

    Args:
        root: the folder that holds ``adult``.
        options: the arguments of :class:`~lightning_gpp.recipes.in_memory.InMemoryData`.
    """

    def __init__(self, root: str | Path, **options: Any) -> None:
        super().__init__(**options)
        self.path = Path(root) / "adult" / "adult.csv"

    def read(self) -> ClickSplit:
        """Reads, splits and encodes the file.

        Raises:
            FileNotFoundError: it is missing.
            ValueError: it is broken; the text names line and column.
        """
        table = read_adult(self.path)
        train, validation = stratified_split(
            table.labels, self.validation_fraction, self.split_seed
        )
        scale = Scale.of(table.numbers[train])
        vocabularies = [vocabulary(column[train]) for column in table.words.T]

        def encoded(rows: IntArray) -> ClickArrays:
            categories = {
                name: np.array([known.get(word, 0) for word in column[rows]], dtype=np.int64)
                for name, known, column in zip(CATEGORICAL, vocabularies, table.words.T)
            }
            dense = scale.apply(table.numbers[rows])
            return ClickArrays(dense, categories, table.labels[rows])

        sizes = {name: 1 + len(known) for name, known in zip(CATEGORICAL, vocabularies)}
        features = Features(len(NUMERIC), sizes)
        return ClickSplit(encoded(train), encoded(validation), features)


@dataclass(frozen=True, slots=True, eq=False)
class AdultTable:
    """The file as it is.

    Shapes:
        - ``numbers``: ``(num_samples, 6)`` float32, the columns :data:`NUMERIC`
        - ``words``: ``(num_samples, 8)`` strings, the columns :data:`CATEGORICAL`
        - ``labels``: ``(num_samples,)`` int64
    """

    numbers: np.ndarray[Any, np.dtype[np.float32]]
    words: np.ndarray[Any, np.dtype[np.object_]]
    labels: IntArray


def read_adult(path: Path) -> AdultTable:
    """Reads ``adult.csv``; further columns and the order of columns do not matter.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is empty, lacks a column, or a row is broken; names line and column.
    """
    rows = text_rows(path, ",", REMEDY)
    line, header = next(rows)
    for name in (*NUMERIC, *CATEGORICAL, TARGET):
        if name not in header:
            got = ", ".join(header)
            raise broken(path, line, name, f"the columns {got}", "a column of this name")
    place = {name: header.index(name) for name in header}
    numbers: list[list[float]] = []
    words: list[list[str]] = []
    labels: list[int] = []
    for line, fields in rows:
        check_width(fields, header, path, line)
        label = CLASSES.get(fields[place[TARGET]])
        if label is None:
            got = repr(fields[place[TARGET]])
            raise broken(path, line, TARGET, got, " or ".join(CLASSES))
        numbers.append([number(fields[place[name]], path, line, name) for name in NUMERIC])
        words.append([fields[place[name]] for name in CATEGORICAL])
        labels.append(label)
    if not labels:
        raise no_samples(path)
    return AdultTable(
        np.array(numbers, dtype=np.float32),
        np.array(words, dtype=object),
        np.array(labels, dtype=np.int64),
    )


def vocabulary(words: Sequence[str] | np.ndarray[Any, Any]) -> dict[str, int]:
    """Numbers from 1 for the words that occur, in alphabetical order; gaps get none.

    >>> vocabulary(["b", "?", "a", "b"])
    {'a': 1, 'b': 2}
    """
    return {word: 1 + i for i, word in enumerate(sorted(set(words) - set(MISSING)))}
