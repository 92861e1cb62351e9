"""The Criteo display-advertising log: was the advertisement clicked?"""

from __future__ import annotations

import itertools
import math
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..split import stratified_split
from .data import ClickArrays, ClickData, ClickSplit, Features
from .rows import broken, check_width, no_samples, number, text_rows

INTEGERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = ("label", *INTEGERS, *CATEGORIES)
REMEDY = (
    "data.root (or LIGHTNING_GPP_DATA) must name the folder that holds criteo/criteo_sample.txt, "
    "data.file another file below it; or train on generated clicks (data=clicks)"
)


class Criteo(ClickData):
    """A click log in the format of Criteo: a label, 13 integers, 26 hashed categories, with gaps.

    Reads ``<root>/<file>`` either tab-separated without a header, as the Kaggle challenge gives
    it, or comma-separated with the header ``label,I1,…,I13,C1,…,C26``. Integers become
    log(1 + x), negative ones count as 0 (Naumov et al. 2019, as their code does); a gap is 0 too,
    told apart by a second dense feature that is 1 where the integer is missing. Categories are
    hashed to a fixed number of rows per table; gaps are a category of their own, index 0.

    Args:
        root: the folder that ``file`` is in.
        file: the log, relative to ``root``.
        num_buckets: rows of every embedding table.
        max_rows: reads only the first rows of a long log; None reads all of them.
        options: the arguments of :class:`~lightning_gpp.recipes.in_memory.InMemoryData`.

    Raises:
        ValueError: ``num_buckets`` or ``max_rows`` is out of range.
    """

    def __init__(
        self,
        root: str | Path,
        file: str = "criteo/criteo_sample.txt",
        num_buckets: int = 1000,
        max_rows: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if num_buckets < 2:
            raise ValueError(f"num_buckets must be at least 2, got {num_buckets}")
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, or null for all, got {max_rows}")
        self.path = Path(root) / file
        self.num_buckets = num_buckets
        self.max_rows = max_rows

    def read(self) -> ClickSplit:
        """Reads, hashes and splits the file.

        Raises:
            FileNotFoundError: it is missing.
            ValueError: it is broken; the text names line and column.
        """
        arrays = read_criteo(self.path, self.num_buckets, self.max_rows)
        train, validation = stratified_split(
            arrays.labels, self.validation_fraction, self.split_seed
        )
        features = Features(2 * len(INTEGERS), dict.fromkeys(CATEGORIES, self.num_buckets))
        return ClickSplit(arrays.take(train), arrays.take(validation), features)


def read_criteo(path: Path, num_buckets: int, max_rows: int | None = None) -> ClickArrays:
    """Samples of a log in either layout.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is empty, or a row is broken; names line and column.
    """
    dense, indices, labels = array("f"), array("q"), array("q")
    for line, fields in itertools.islice(_samples(path), max_rows):
        check_width(fields, COLUMNS, path, line)
        if fields[0] not in ("0", "1"):
            raise broken(path, line, "label", repr(fields[0]), "0 or 1")
        labels.append(int(fields[0]))
        texts = dict(zip(INTEGERS, fields[1:14]))
        dense.extend(log_count(text, path, line, name) for name, text in texts.items())
        dense.extend(float(text == "") for text in texts.values())
        indices.extend(bucket(text, num_buckets) for text in fields[14:])
    if not labels:
        raise no_samples(path)
    columns = np.array(indices, dtype=np.int64).reshape(-1, len(CATEGORIES))
    return ClickArrays(
        np.array(dense, dtype=np.float32).reshape(-1, 2 * len(INTEGERS)),
        {name: columns[:, i].copy() for i, name in enumerate(CATEGORIES)},
        np.array(labels, dtype=np.int64),
    )


def log_count(text: str, path: Path, line: int, column: str) -> float:
    """``log(1 + x)`` of a count, 0 for a gap and for negative counts."""
    return math.log1p(max(number(text, path, line, column), 0.0)) if text else 0.0


def bucket(category: str, num_buckets: int) -> int:
    """The row of a category: 0 for a gap, else by a checksum, the same in every process.

    >>> bucket("", 1000), bucket("05db9164", 1000), bucket("68fd1e64", 1000)
    (0, 680, 653)
    """
    return 1 + zlib.crc32(category.encode()) % (num_buckets - 1) if category else 0


def _samples(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Rows of the log without the header, if there is one."""
    rows = text_rows(path, _delimiter(path), REMEDY)
    for line, fields in rows:
        if line > 1 or fields[0] != "label":
            yield line, fields
        elif tuple(fields) != COLUMNS:
            column, got = next(
                (want, have)
                for want, have in itertools.zip_longest(COLUMNS, fields, fillvalue="no column")
                if want != have
            )
            raise broken(path, line, column, got, "the header label,I1,…,I13,C1,…,C26")


def _delimiter(path: Path) -> str:
    """Tab where the first line has one, else comma."""
    if not path.is_file():
        return ","  # reading it says that it is not there
    with path.open("rb") as file:
        return "\t" if b"\t" in file.readline() else ","
