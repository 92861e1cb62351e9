"""Rows for training and rows for validation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def stratified_split(
    labels: IntArray, validation_fraction: float, seed: int
) -> tuple[IntArray, IntArray]:
    """Rows for training and for validation, in ascending order, the same share of every class.

    Raises:
        ValueError: a class would have no sample on one of the two sides.

    >>> [part.tolist() for part in stratified_split(np.array([0, 1, 0, 1]), 0.5, seed=0)]
    [[2, 3], [0, 1]]
    """
    generator = np.random.default_rng(seed)
    validation_rows: list[int] = []
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        count = round(validation_fraction * len(rows))
        if not 0 < count < len(rows):
            raise ValueError(
                f"class {label} has {len(rows)} samples, too few to keep {validation_fraction:.0%} "
                "of them for validation; change validation_fraction or give more data"
            )
        validation_rows += generator.permutation(rows)[:count].tolist()
    is_validation = np.zeros(len(labels), dtype=bool)
    is_validation[validation_rows] = True
    return np.flatnonzero(~is_validation), np.flatnonzero(is_validation)
