"""The module and the data of cases that need no others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as lp
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

WIDTH, NUM_TARGETS = 5, 3


class StepsModule(lp.LightningModule):
    """A step of every kind, with logs; a subclass has layers, a forward and a loss."""

    def loss(self, batch: Any) -> Tensor:
        """The loss of a batch."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class CaseModule(StepsModule):
    """Two towers and a head, on the mean squared error of a batch ``(x, y)``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(21)
        self.left = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh())
        self.right = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU())
        self.fuse = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, NUM_TARGETS)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.left(x), self.right(x.flip(1))], dim=1)
        return self.head(self.norm(self.fuse(joined)))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)


class PairModule(StepsModule):
    """Two towers that meet in the loss only: an embedding of ``x`` and one of ``y``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(22)
        self.first = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 6))
        self.second = nn.Sequential(nn.Linear(NUM_TARGETS, 8), nn.GELU(), nn.Linear(8, 6))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(y)


@dataclass(frozen=True)
class CaseData:
    """Loaders of all kinds, each of other samples, the last batch smaller.

    Attributes:
        num_samples: of the training data; the others have five fewer.
        batch_size: of every loader.
        collate: makes a batch of a list of ``(x, y)``.
    """

    num_samples: int = 29
    batch_size: int = 8
    collate: Any = default_collate

    def dataset(self, seed: int, num_samples: int | None = None) -> TensorDataset:
        """Random samples ``(x, y)`` with targets that can be learned."""
        generator = torch.Generator().manual_seed(seed)
        num = self.num_samples - 5 if num_samples is None else num_samples
        x = torch.randn(num, WIDTH, generator=generator, dtype=torch.float64)
        total = x.sin().sum(1)
        return TensorDataset(x, torch.stack([total, total.cos(), total.tanh()], 1))

    def loader(self, seed: int, num_samples: int | None = None, **options: Any) -> DataLoader[Any]:
        """Batches of such samples."""
        data = self.dataset(seed, num_samples)
        return DataLoader(data, batch_size=self.batch_size, collate_fn=self.collate, **options)

    def arguments(self) -> Mapping[str, Any]:
        """One loader for each purpose."""
        return {
            "train_dataloaders": self.loader(1, self.num_samples),
            "val_dataloaders": self.loader(2),
            "test_dataloaders": self.loader(3),
            "predict_dataloaders": self.loader(4),
        }


def data(**options: Any) -> Any:
    """Makes a case's data: ``data=data(batch_size=4)``."""
    return partial(CaseData.arguments, CaseData(**options))
