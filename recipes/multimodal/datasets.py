"""The data sets of the multimodal recipe: handwritten digits, each seen in several ways."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ..scale import FloatArray
from ..split import IntArray
from .data import MultiViewArrays, MultiViewData

NUM_DIGITS = 10


class MultipleFeatures(MultiViewData):
    """UCI Multiple Features: 2,000 handwritten digits seen through six feature sets.

    Reads ``<root>/mfeat/mfeat-<view>.csv``: the first line holds column numbers, the last column
    the class, and row ``i`` is the same digit in every file.

    Source: van Breukelen, Duin, Tax, den Hartog (Kybernetika 34, 1998), https://doi.org/10.24432/C5HC70.

    Args:
        root: the folder that holds ``mfeat``.
        options: the arguments of :class:`MultiViewData`.
    """

    #: Fourier coefficients, profile correlations, Karhunen-Loève coefficients, morphology,
    #: pixel averages, Zernike moments.
    VIEW_SIZES = MappingProxyType(
        {
            "fou": 76,
            "fac": 216,
            "kar": 64,
            "mor": 6,
            "pix": 240,
            "zer": 47,
        }
    )
    NUM_CLASSES = NUM_DIGITS

    def __init__(self, root: str | Path, **options: Any) -> None:
        super().__init__(**options)
        self.root = Path(root)

    def read(self) -> MultiViewArrays:
        """Reads the six files.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is broken, or the files do not hold the same samples.
        """
        folder = self.root / "mfeat"
        tables = {
            name: read_view(folder / f"mfeat-{name}.csv", num_features, NUM_DIGITS)
            for name, num_features in self.VIEW_SIZES.items()
        }
        first, (_, labels) = next(iter(tables.items()))
        for name, (_, others) in tables.items():
            if not np.array_equal(labels, others):
                raise ValueError(
                    f"{folder}: the class columns of mfeat-{first}.csv and mfeat-{name}.csv "
                    f"differ ({len(labels)} and {len(others)} rows), so their rows are not the "
                    "same samples; fetch all files from one source"
                )
        return MultiViewArrays({name: view for name, (view, _) in tables.items()}, labels)


class Digits(MultiViewData):
    """scikit-learn's 1,797 digits of 8x8 pixels in four views; needs no file.

    The views are the pixels, the row and column profiles, the magnitudes of the Fourier
    transform (which do not see where the digit stands), and statistics of the four quadrants.
    """

    VIEW_SIZES = MappingProxyType(
        {
            "pixels": 64,
            "profiles": 32,
            "fourier": 40,
            "quadrants": 16,
        }
    )
    NUM_CLASSES = NUM_DIGITS

    def read(self) -> MultiViewArrays:
        """Computes the views from the images that scikit-learn ships."""
        from sklearn.datasets import load_digits  # here: its import takes a second

        digits = load_digits()
        images = digits.images.astype(np.float32) / 16.0
        return MultiViewArrays(digit_views(images), digits.target.astype(np.int64))


def multimodal_data(root: str | Path | None = None, **options: Any) -> MultiViewData:
    """UCI Multiple Features below ``root``, or scikit-learn's digits where there is no root."""
    return Digits(**options) if root is None else MultipleFeatures(root, **options)


def read_view(path: Path, num_features: int, num_classes: int) -> tuple[FloatArray, IntArray]:
    """Features and classes of one file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a table of numbers, has another number of columns, holds
            values that are not finite, or classes outside ``0 … num_classes - 1``.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not there; data.root (or LIGHTNING_GPP_DATA) must name the folder that "
            "holds mfeat/mfeat-*.csv, or be left out to train on scikit-learn's digits "
            "(data.root=null)"
        )
    try:
        table = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2, dtype=np.float64)
    except ValueError as error:
        raise ValueError(f"{path} is not a table of numbers: {error}") from error
    if table.shape[0] == 0 or table.shape[1] != num_features + 1:
        raise ValueError(
            f"{path} has {table.shape[0]} rows of {table.shape[1]} columns, expected at least one "
            f"row of {num_features} features and the class"
        )
    labels = table[:, -1].astype(np.int64)
    if not np.isfinite(table).all():
        raise ValueError(f"{path} holds values that are not finite")
    if (labels != table[:, -1]).any() or labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(
            f"{path}: the last column must hold classes 0 to {num_classes - 1}, it holds "
            f"{table[:, -1].min():g} to {table[:, -1].max():g}"
        )
    return table[:, :-1].astype(np.float32), labels


def digit_views(images: FloatArray) -> dict[str, FloatArray]:
    """The four views of a stack of images.

    Shapes:
        - ``images``: ``(num_samples, 8, 8)``, values from 0 to 1
    """
    count = len(images)
    rows, columns = images.sum(axis=2), images.sum(axis=1)
    row_peaks, column_peaks = images.argmax(axis=2) / 7.0, images.argmax(axis=1) / 7.0
    quadrants = images.reshape(count, 2, 4, 2, 4).transpose(0, 1, 3, 2, 4).reshape(count, 4, 16)
    statistics = [
        quadrants.mean(axis=2),
        quadrants.std(axis=2),
        quadrants.max(axis=2),
        (quadrants > 0.5).mean(axis=2),
    ]
    views = {
        "pixels": images.reshape(count, 64),
        "profiles": np.concatenate([rows, columns, row_peaks, column_peaks], axis=1),
        "fourier": np.abs(np.fft.rfft2(images)).reshape(count, 40),
        "quadrants": np.concatenate(statistics, axis=1),
    }
    return {name: view.astype(np.float32) for name, view in views.items()}
