"""Writes small files in the layout of UCI Multiple Features."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np


def write_mfeat(root: Path, view_sizes: Mapping[str, int], labels: np.ndarray) -> None:
    """Row ``i`` of a view holds its class in every feature, plus some noise."""
    folder = root / "mfeat"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name, num_features in view_sizes.items():
        noise = generator.normal(scale=0.1, size=(len(labels), num_features))
        write_view(folder / f"mfeat-{name}.csv", labels[:, None] + noise, labels)


def write_view(path: Path, features: np.ndarray, labels: np.ndarray) -> None:
    """One file: a line of column numbers, then features and class of each sample."""
    header = ",".join([*map(str, range(features.shape[1])), "0"])
    table = np.column_stack([features, labels])
    np.savetxt(path, table, delimiter=",", fmt="%.6g", header=header, comments="")
