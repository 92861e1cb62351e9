"""DLRM: dense features and categories, their pairwise interaction, and a click probability.

Source: Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and
Recommendation Systems", arXiv 1906.00091. Every embedding table is a module of its own, so the
tables can go to different devices, as section 3 of the paper does by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

from .interaction import DotInteraction

if TYPE_CHECKING:
    from .data import Batch, ClickData

BAG_MODES = ("mean", "sum")
DEFAULT_OPTIMIZER = MappingProxyType({"name": "AdamW", "lr": 2e-3, "weight_decay": 1.0})


class DLRM(LightningModule):
    """Predicts a yes or no from dense features and categories.

    A bottom MLP maps the dense features to a vector as wide as the embeddings; the dot products of
    all pairs of vectors, beside the bottom vector itself, go into a top MLP that gives one logit.

    Args:
        num_dense: number of dense features.
        table_sizes: rows of the embedding table of each categorical feature.
        bag_modes: ``"mean"`` or ``"sum"`` for each feature that holds several categories per
            sample; their index 0 fills short bags up and adds nothing.
        embedding_width: width of all embeddings.
        bottom_widths: hidden widths of the bottom MLP.
        top_widths: hidden widths of the top MLP.
        dropout: probability of dropping a feature of the last hidden layer.
        sparse_gradients: whether the gradients of the tables hold only the rows that were read;
            takes an optimizer that accepts them (SGD, Adagrad).
        optimizer: ``name`` of a class of ``torch.optim``, and its options.

    Shapes:
        - ``forward(dense, categories)``: dense ``(num_samples, num_dense)``, each of the
          categories ``(num_samples,)`` int64 or, of a bag, ``(num_samples, bag_length)``; returns
          logits ``(num_samples,)``

    Raises:
        ValueError: there is no dense or no categorical feature, a bag has no table or an unknown
            mode, or the optimizer is unknown.

    >>> model = DLRM(3, {"user": 10, "tags": 5}, {"tags": "mean"})
    >>> categories = {"user": torch.tensor([1, 9]), "tags": torch.tensor([[1, 4], [2, 0]])}
    >>> model(torch.zeros(2, 3), categories).shape
    torch.Size([2])
    """

    def __init__(
        self,
        num_dense: int,
        table_sizes: Mapping[str, int],
        bag_modes: Mapping[str, str] = MappingProxyType({}),
        embedding_width: int = 8,
        bottom_widths: Sequence[int] = (64, 32),
        top_widths: Sequence[int] = (64, 32),
        dropout: float = 0.0,
        sparse_gradients: bool = False,
        optimizer: Mapping[str, Any] = DEFAULT_OPTIMIZER,
    ) -> None:
        super().__init__()
        _check_features(num_dense, table_sizes, bag_modes)
        self.optimizer_options = dict(optimizer)
        self.optimizer_class = _optimizer_class(self.optimizer_options.pop("name", None))
        self.save_hyperparameters(
            {
                "num_dense": num_dense,
                "table_sizes": dict(table_sizes),
                "bag_modes": dict(bag_modes),
                "embedding_width": embedding_width,
                "bottom_widths": list(bottom_widths),
                "top_widths": list(top_widths),
                "dropout": dropout,
                "sparse_gradients": sparse_gradients,
                "optimizer": dict(optimizer),
            }
        )
        self.bottom = nn.Sequential(*_hidden(num_dense, [*bottom_widths, embedding_width]))
        self.tables = nn.ModuleDict(
            {
                name: _table(num_rows, embedding_width, bag_modes.get(name), sparse_gradients)
                for name, num_rows in table_sizes.items()
            }
        )
        num_vectors = 1 + len(table_sizes)
        self.interaction = DotInteraction(num_vectors)
        top_inputs = embedding_width + num_vectors * (num_vectors - 1) // 2
        self.top = nn.Sequential(
            *_hidden(top_inputs, top_widths),
            nn.Dropout(dropout),
            nn.Linear([top_inputs, *top_widths][-1], 1),
        )
        self.loss = nn.BCEWithLogitsLoss()
        self.val_auc = BinaryAUROC()
        self.val_acc = BinaryAccuracy()

    @classmethod
    def for_data(cls, data: ClickData, **options: Any) -> DLRM:
        """The model for the features of ``data``, which reads its files for that.

        Raises:
            TypeError: these are no data of this recipe.
        """
        features = getattr(data, "features", None)
        if features is None:
            raise TypeError(
                f"the recipe dlrm got data of type {type(data).__name__}; expected data=adult, "
                "data=criteo or data=clicks"
            )
        return cls(features.num_dense, features.table_sizes, features.bag_modes, **options)

    def forward(self, dense: Tensor, categories: Mapping[str, Tensor]) -> Tensor:
        """Logits of a batch of samples."""
        bottom = self.bottom(dense)
        embedded = [table(categories[name]) for name, table in self.tables.items()]
        products = self.interaction(torch.stack([bottom, *embedded], dim=1))
        logits: Tensor = self.top(torch.cat([bottom, products], dim=1))
        return logits.squeeze(1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean cross entropy of the batch, logged as ``train_loss``."""
        dense, categories, labels = batch
        loss: Tensor = self.loss(self(dense, categories), labels)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(labels))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs ``val_loss``, ``val_auc`` and ``val_acc`` of all validation samples."""
        dense, categories, labels = batch
        logits = self(dense, categories)
        self.val_auc.update(logits, labels.long())
        self.val_acc.update(logits, labels.long())
        self.log("val_loss", self.loss(logits, labels), prog_bar=True, batch_size=len(labels))
        self.log("val_auc", self.val_auc, prog_bar=True, batch_size=len(labels))
        self.log("val_acc", self.val_acc, batch_size=len(labels))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The probability of a click for every sample."""
        dense, categories, _ = batch
        probabilities: Tensor = self(dense, categories).sigmoid()
        return probabilities

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer that was asked for, over all parameters."""
        return self.optimizer_class(self.parameters(), **self.optimizer_options)


def _check_features(
    num_dense: int, table_sizes: Mapping[str, int], bag_modes: Mapping[str, str]
) -> None:
    if num_dense < 1:
        raise ValueError(f"num_dense must be at least 1, got {num_dense}")
    if not table_sizes:
        raise ValueError("table_sizes is empty: DLRM needs at least one categorical feature")
    for name, mode in bag_modes.items():
        if name not in table_sizes or mode not in BAG_MODES:
            raise ValueError(
                f"bag_modes[{name!r}] is {mode!r}; expected one of {', '.join(BAG_MODES)} for a "
                f"feature of table_sizes ({', '.join(table_sizes)})"
            )


def _optimizer_class(name: str | None) -> type[torch.optim.Optimizer]:
    known = {
        key: kind
        for key, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    if name not in known:
        raise ValueError(f"optimizer.name is {name!r}; expected one of {', '.join(sorted(known))}")
    return known[name]


def _hidden(num_inputs: int, widths: Sequence[int]) -> list[nn.Module]:
    sizes = [num_inputs, *widths]
    pairs = zip(sizes, sizes[1:])
    return [layer for a, b in pairs for layer in (nn.Linear(a, b), nn.ReLU())]


def _table(num_rows: int, width: int, bag_mode: str | None, sparse: bool) -> nn.Module:
    """An embedding table, its first weights as small as those of a layer with one input per row."""
    table: nn.Embedding | nn.EmbeddingBag
    if bag_mode is None:
        table = nn.Embedding(num_rows, width, sparse=sparse)
    else:
        table = nn.EmbeddingBag(num_rows, width, mode=bag_mode, sparse=sparse, padding_idx=0)
    with torch.no_grad():
        table.weight.uniform_(-(num_rows**-0.5), num_rows**-0.5)
        if bag_mode is not None:
            table.weight[0] = 0.0
    return table
