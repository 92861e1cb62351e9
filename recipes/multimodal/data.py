"""Samples in several views: split, normalisation, batches.

A batch is ``(views, labels)`` with ``views`` a dict from the view's name to a tensor
``(num_samples, num_features)``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Batch: TypeAlias = tuple[dict[str, Tensor], Tensor]
FloatArray: TypeAlias = npt.NDArray[np.float32]
IntArray: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class MultiViewArrays:
    """A whole data set in memory: row ``i`` of every view and ``labels[i]`` are one sample.

    Shapes:
        - ``views[name]``: ``(num_samples, num_features)``
        - ``labels``: ``(num_samples,)``, class numbers from 0
    """

    views: Mapping[str, FloatArray]
    labels: IntArray


class MultiViewDataset(Dataset[Batch]):
    """The samples ``rows`` of a data set, each view scaled by the given mean and deviation.

    Batches are gathered by index in one go (``__getitems__``), not sample by sample.
    """

    def __init__(self, arrays: MultiViewArrays, rows: IntArray, scales: Mapping[str, Scale]):
        self.views = {
            name: torch.from_numpy(scales[name].apply(view[rows]))
            for name, view in arrays.views.items()
        }
        self.labels = torch.from_numpy(arrays.labels[rows])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return {name: view[index] for name, view in self.views.items()}, self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        rows = torch.as_tensor(indices)
        return {name: view[rows] for name, view in self.views.items()}, self.labels[rows]


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """Mean and deviation of each feature over the training samples.

    Shapes:
        - ``mean``, ``deviation``: ``(num_features,)``; constant features have deviation 1
    """

    mean: FloatArray
    deviation: FloatArray

    @classmethod
    def of(cls, values: FloatArray) -> Scale:
        """The scale of ``values``, shape ``(num_samples, num_features)``."""
        wide = values.astype(np.float64)
        deviation = wide.std(axis=0)
        deviation[deviation < 1e-6 * np.maximum(np.abs(wide).max(axis=0), 1e-12)] = 1.0
        return cls(wide.mean(axis=0).astype(np.float32), deviation.astype(np.float32))

    def apply(self, values: FloatArray) -> FloatArray:
        """``values`` with mean 0 and deviation 1, as far as they look like the training set."""
        return (values - self.mean) / self.deviation


class MultiViewData(LightningDataModule):
    """A data set in several views as training and validation batches.

    The split is stratified by class and depends on ``split_seed`` alone; features are scaled by
    mean and deviation of the training samples, so a sample never depends on its batch.

    Args:
        batch_size: samples of a mini-batch.
        validation_fraction: share of the samples kept for validation.
        split_seed: seed of the split.
        num_workers: processes that load data; the data are in memory, so 0 is fastest.

    Raises:
        ValueError: ``batch_size`` or ``validation_fraction`` is out of range.
    """

    def __init__(
        self,
        batch_size: int = 64,
        validation_fraction: float = 0.2,
        split_seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if not 0.0 < validation_fraction < 1.0:
            raise ValueError(
                f"validation_fraction must be between 0 and 1, got {validation_fraction}"
            )
        self.batch_size = batch_size
        self.validation_fraction = validation_fraction
        self.split_seed = split_seed
        self.num_workers = num_workers
        self.train_set: MultiViewDataset | None = None
        self.validation_set: MultiViewDataset | None = None

    @property
    @abstractmethod
    def view_sizes(self) -> Mapping[str, int]:
        """Number of features of each view; known before anything is read."""

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Number of classes; known before anything is read."""

    @abstractmethod
    def read(self) -> MultiViewArrays:
        """Reads the whole data set."""

    def setup(self, stage: str | None = None) -> None:
        """Reads, splits and scales the data, once."""
        if self.train_set is not None:
            return
        arrays = self.read()
        train_rows, validation_rows = stratified_split(
            arrays.labels, self.validation_fraction, self.split_seed
        )
        scales = {name: Scale.of(view[train_rows]) for name, view in arrays.views.items()}
        self.train_set = MultiViewDataset(arrays, train_rows, scales)
        self.validation_set = MultiViewDataset(arrays, validation_rows, scales)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Shuffled mini-batches of the training samples; the last one may be smaller."""
        return self._loader(self.train_set, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Mini-batches of the validation samples, in a fixed order."""
        return self._loader(self.validation_set, shuffle=False)

    def _loader(self, dataset: MultiViewDataset | None, *, shuffle: bool) -> DataLoader[Batch]:
        if dataset is None:
            raise RuntimeError("call setup() before asking for a loader")
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            collate_fn=already_a_batch,
        )


def already_a_batch(batch: Any) -> Any:
    """Collate function of a data set that gathers whole batches itself."""
    return batch


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
