"""Data sets that are held in memory and gathered a batch at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader


class BatchGathering(Protocol):
    """A data set that gathers whole batches by index, not sample by sample."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...

    def __getitems__(self, indices: Sequence[int]) -> Any: ...


class InMemoryData(LightningDataModule):
    """A data set in memory as training and validation batches.

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
        self.train_set: BatchGathering | None = None
        self.validation_set: BatchGathering | None = None

    @abstractmethod
    def build_sets(self) -> tuple[BatchGathering, BatchGathering]:
        """Reads and splits the data; returns the training and the validation samples."""

    def setup(self, stage: str | None = None) -> None:
        """Reads and splits the data, once."""
        if self.train_set is None:
            self.train_set, self.validation_set = self.build_sets()

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled mini-batches of the training samples; the last one may be smaller."""
        return self._loader(self.train_set, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Mini-batches of the validation samples, in a fixed order."""
        return self._loader(self.validation_set, shuffle=False)

    def predict_dataloader(self) -> DataLoader[Any]:
        """Those of the validation samples."""
        return self.val_dataloader()

    def _loader(self, dataset: BatchGathering | None, *, shuffle: bool) -> DataLoader[Any]:
        if dataset is None:
            raise RuntimeError("call setup() before asking for a loader")
        return DataLoader(
            dataset,  # type: ignore[arg-type]  # a Dataset by what it does
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            collate_fn=already_a_batch,
        )


def already_a_batch(batch: Any) -> Any:
    """Collate function of a data set that gathers whole batches itself."""
    return batch
