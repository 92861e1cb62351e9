"""A loss that is a mean over counted places, as those of language models are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from helpers.models import DataSpec
from helpers.random_models import SupervisedModule

LENGTH = 6


@dataclass(frozen=True)
class MaskedData(DataSpec):
    """Sequences, and which of their places count.

    Attributes:
        counts: places that count in each sample.
        as_labels: places that do not count are labelled -100; else they are left out by a mask.
    """

    counts: tuple[int, ...] = (3,) * 8
    as_labels: bool = True

    def loader(self) -> DataLoader[Any]:
        """One batch ``(x, labels)`` or ``(x, labels, mask)``."""
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(len(self.counts), LENGTH, 4, generator=generator, dtype=torch.float64)
        mask = torch.arange(LENGTH) < torch.tensor(self.counts)[:, None]
        labels = (x.sum(2) > 0).long()
        if self.as_labels:
            return DataLoader(TensorDataset(x, labels.where(mask, -100)), len(x))
        return DataLoader(TensorDataset(x, labels, mask.double()), len(x))


class MaskedModel(SupervisedModule):
    """Classifies every place; the loss is a mean over the places that count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def step_loss(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        x, labels, *masks = batch
        logits = self(x)
        if not masks:
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), [logits]
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return (losses * masks[0]).sum() / masks[0].sum(), [logits]
