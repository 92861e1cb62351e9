"""One encoder per view, fusion by concatenation, a head.

The graph has as many independent branches as there are views, of very different widths in
UCI Multiple Features (6 to 240 features). It is the small sibling of the CANDLE-Uno and
multi-tower models of GraphPipe (arXiv 2406.17145, section 7).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

if TYPE_CHECKING:
    from .data import Batch, MultiViewData


class MultimodalClassifier(LightningModule):
    """Classifies samples that are given as several views.

    Normalisation works on the sample (LayerNorm): nothing in the network depends on which
    samples share a batch.

    Args:
        view_sizes: number of features of each view, in the order in which they are fused.
        num_classes: number of classes.
        encoder_width: width of each encoder.
        encoder_depth: number of blocks of each encoder.
        dropout: probability of dropping a feature of the fused representation.
        learning_rate: AdamW's learning rate at its peak.
        weight_decay: AdamW's weight decay.

    Shapes:
        - ``forward(views)``: each view ``(num_samples, view_sizes[name])``; returns logits
          ``(num_samples, num_classes)``

    Raises:
        ValueError: there is no view.

    >>> model = MultimodalClassifier({"pixels": 64, "profiles": 16}, num_classes=10)
    >>> model({"pixels": torch.zeros(3, 64), "profiles": torch.zeros(3, 16)}).shape
    torch.Size([3, 10])
    """

    def __init__(
        self,
        view_sizes: Mapping[str, int],
        num_classes: int,
        encoder_width: int = 128,
        encoder_depth: int = 2,
        dropout: float = 0.0,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.05,
    ) -> None:
        super().__init__()
        if not view_sizes:
            raise ValueError("view_sizes is empty: the classifier needs at least one view")
        self.save_hyperparameters(
            {
                "view_sizes": dict(view_sizes),
                "num_classes": num_classes,
                "encoder_width": encoder_width,
                "encoder_depth": encoder_depth,
                "dropout": dropout,
                "learning_rate": learning_rate,
                "weight_decay": weight_decay,
            }
        )
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.encoders = nn.ModuleDict(
            {
                name: _encoder(num_features, encoder_width, encoder_depth)
                for name, num_features in view_sizes.items()
            }
        )
        fused_width = encoder_width * len(view_sizes)
        self.head = nn.Sequential(
            *_block(fused_width, encoder_width),
            nn.Dropout(dropout),
            nn.Linear(encoder_width, num_classes),
        )
        self.loss = nn.CrossEntropyLoss()

    @classmethod
    def for_data(cls, data: MultiViewData, **options: float) -> MultimodalClassifier:
        """The classifier for the views and classes of ``data``.

        Raises:
            TypeError: these are no data of this recipe.
        """
        if not hasattr(data, "VIEW_SIZES"):
            raise TypeError(
                f"the recipe multimodal got data of type {type(data).__name__}; expected "
                "data=mfeat or data=digits"
            )
        return cls(data.VIEW_SIZES, data.NUM_CLASSES, **options)  # type: ignore[arg-type]

    def forward(self, views: Mapping[str, Tensor]) -> Tensor:
        """Logits of a batch of samples."""
        encoded = [encoder(views[name]) for name, encoder in self.encoders.items()]
        logits: Tensor = self.head(torch.cat(encoded, dim=1))
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean cross entropy of the batch, logged as ``train_loss``."""
        views, labels = batch
        loss: Tensor = self.loss(self(views), labels)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(labels))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs ``val_loss`` and ``val_acc``, means over the validation samples."""
        views, labels = batch
        logits = self(views)
        accuracy = (logits.argmax(dim=1) == labels).to(logits.dtype).mean()
        self.log("val_loss", self.loss(logits, labels), prog_bar=True, batch_size=len(labels))
        self.log("val_acc", accuracy, prog_bar=True, batch_size=len(labels))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The most likely class of every sample."""
        views, _ = batch
        classes: Tensor = self(views).argmax(dim=1)
        return classes

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(
            self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay
        )


def _block(num_inputs: int, num_outputs: int) -> tuple[nn.Module, nn.Module, nn.Module]:
    return nn.Linear(num_inputs, num_outputs), nn.LayerNorm(num_outputs), nn.GELU()


def _encoder(num_features: int, width: int, depth: int) -> nn.Sequential:
    widths = [num_features] + [width] * depth
    blocks = [_block(before, after) for before, after in zip(widths, widths[1:], strict=False)]
    return nn.Sequential(*(layer for block in blocks for layer in block))
