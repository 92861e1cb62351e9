"""A recipe of a user's that has a test: digits, tested on those that were kept for validation."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from lightning_gpp.recipes.multimodal import Digits, MultimodalClassifier


class TestedDigits(Digits):
    """Data with a test."""

    __test__ = False

    def test_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()


class TestedClassifier(MultimodalClassifier):
    """A module with a test."""

    __test__ = False

    def test_step(self, batch: Any, batch_idx: int) -> None:
        views, labels = batch
        accuracy = (self(views).argmax(dim=1) == labels).to(float).mean()
        self.log("test_acc", accuracy, batch_size=len(labels))
