"""Samples of numbers, categories and a yes or no: the form that all data of this recipe take.

A batch is ``(dense, categories, labels)``: ``dense`` ``(num_samples, num_dense)`` float,
``categories`` a dict from the feature's name to ``(num_samples,)`` or ``(num_samples,
bag_length)`` int64, ``labels`` ``(num_samples,)`` float, 0 or 1.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..in_memory import InMemoryData
from ..scale import FloatArray
from ..split import IntArray

Batch: TypeAlias = tuple[Tensor, dict[str, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Features:
    """What a model must know of the data.

    Attributes:
        num_dense: number of dense features.
        table_sizes: number of categories of each categorical feature, the one for what is missing
            or unknown (or fills up a bag) included.
        bag_modes: ``"mean"`` or ``"sum"`` for each feature that holds several categories a sample.
    """

    num_dense: int
    table_sizes: Mapping[str, int]
    bag_modes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class ClickArrays:
    """Samples in memory: row ``i`` of every array is one sample.

    Shapes:
        - ``dense``: ``(num_samples, num_dense)``
        - ``categories[name]``: ``(num_samples,)`` or ``(num_samples, bag_length)``
        - ``labels``: ``(num_samples,)``, 0 or 1
    """

    dense: FloatArray
    categories: Mapping[str, IntArray]
    labels: IntArray

    def take(self, rows: IntArray) -> ClickArrays:
        """The samples of the given rows."""
        categories = {name: column[rows] for name, column in self.categories.items()}
        return ClickArrays(self.dense[rows], categories, self.labels[rows])


@dataclass(frozen=True, slots=True, eq=False)
class ClickSplit:
    """Samples for training, samples for validation, and what they look like."""

    train: ClickArrays
    validation: ClickArrays
    features: Features


class ClickDataset(Dataset[Batch]):
    """Samples that are gathered by index in one go (``__getitems__``)."""

    def __init__(self, arrays: ClickArrays) -> None:
        self.dense = torch.from_numpy(arrays.dense)
        self.categories = {name: torch.from_numpy(c) for name, c in arrays.categories.items()}
        self.labels = torch.from_numpy(arrays.labels).to(self.dense.dtype)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self._at(torch.tensor(index))

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        return self._at(torch.as_tensor(indices))

    def _at(self, rows: Tensor) -> Batch:
        categories = {name: column[rows] for name, column in self.categories.items()}
        return self.dense[rows], categories, self.labels[rows]


class ClickData(InMemoryData):
    """Samples of dense and categorical features as training and validation batches."""

    def __init__(self, batch_size: int = 1024, **options: Any) -> None:
        super().__init__(batch_size=batch_size, **options)
        self._features: Features | None = None

    @property
    def features(self) -> Features:
        """Numbers of features and categories; reads the data if that was not done yet."""
        self.setup()
        assert self._features is not None
        return self._features

    @abstractmethod
    def read(self) -> ClickSplit:
        """Reads the data; what is fitted to them is fitted to the training samples alone."""

    def build_sets(self) -> tuple[ClickDataset, ClickDataset]:
        """Reads and splits the data."""
        split = self.read()
        self._features = split.features
        return ClickDataset(split.train), ClickDataset(split.validation)
