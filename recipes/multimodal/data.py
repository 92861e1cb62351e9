"""Samples in several views: split, normalisation, batches.

A batch is ``(views, labels)`` with ``views`` a dict from the view's name to a tensor
``(num_samples, num_features)``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..in_memory import InMemoryData
from ..scale import FloatArray, Scale
from ..split import IntArray, stratified_split

Batch: TypeAlias = tuple[dict[str, Tensor], Tensor]


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


class MultiViewData(InMemoryData):
    """A data set in several views as training and validation batches.

    The split is stratified by class and depends on ``split_seed`` alone; features are scaled by
    mean and deviation of the training samples, so a sample never depends on its batch.
    """

    #: Number of features of each view.
    VIEW_SIZES: ClassVar[Mapping[str, int]]
    #: Number of classes.
    NUM_CLASSES: ClassVar[int]

    @abstractmethod
    def read(self) -> MultiViewArrays:
        """Reads the whole data set."""

    def build_sets(self) -> tuple[MultiViewDataset, MultiViewDataset]:
        """Reads, splits and scales the data."""
        arrays = self.read()
        train_rows, validation_rows = stratified_split(
            arrays.labels, self.validation_fraction, self.split_seed
        )
        scales = {name: Scale.of(view[train_rows]) for name, view in arrays.views.items()}
        return (
            MultiViewDataset(arrays, train_rows, scales),
            MultiViewDataset(arrays, validation_rows, scales),
        )
