"""Losses and numbers of the whole batch: no mean over samples gives them.

Every last batch is smaller than the others; the losses that depend most on how a batch is cut
also run with accumulated and clipped gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as lp
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc, binary_f1_score

from conformance.case import Case, calls, odd
from conformance.modules import CaseModule, PairModule, StepsModule, data

ACCUMULATED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}

# Losses that compare samples ---------------------------------------------------------------------


class ContrastiveModule(PairModule):
    """As CLIP: which of the batch's pairs belong together, at a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def loss(self, batch: Any) -> Tensor:
        first, second = (F.normalize(rows, dim=1) for rows in self(*batch))
        scores = self.log_scale.exp() * first @ second.T
        pairs = torch.arange(len(scores), device=scores.device)
        self.log("hits", (scores.argmax(1) == pairs).double().mean())
        return (F.cross_entropy(scores, pairs) + F.cross_entropy(scores.T, pairs)) / 2


class RankingModule(CaseModule):
    """Every two samples of a batch must come in the order of their targets."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        found = self(x)[:, 0]
        order = (y[:, None, 0] - y[None, :, 0]).sign()
        return F.softplus(-order * (found[:, None] - found[None, :]))[order > 0].mean()


class HardestModule(CaseModule):
    """The nearest sample of another class must be farther than the farthest of the same."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        output = self(x)
        squares = (output[:, None] - output[None, :]).square().sum(2)
        same = y.argmax(1)[:, None] == y.argmax(1)[None, :]
        farthest = squares.where(same, 0).amax(1)
        nearest = squares.where(~same, 100).amin(1)
        return (1 + farthest - nearest).relu().mean()


# Statistics of the batch -------------------------------------------------------------------------


def covariance_terms(rows: Tensor) -> Tensor:
    """Of VICReg: features must vary within the batch, and not vary together."""
    centred = rows - rows.mean(0)
    covariance = centred.T @ centred / (len(rows) - 1)
    spread = (1 - (covariance.diagonal() + 1e-4).sqrt()).relu().mean()
    return spread + (covariance - covariance.diag().diag()).square().sum() / rows.shape[1]


class CovarianceModule(PairModule):
    """As VICReg: both embeddings alike, and a regulariser on their covariance in the batch."""

    def loss(self, batch: Any) -> Tensor:
        first, second = self(*batch)
        return F.mse_loss(first, second) + covariance_terms(first) + covariance_terms(second)


class CorrelationModule(PairModule):
    """As Barlow Twins: the correlation of both embeddings over the batch is the identity."""

    def loss(self, batch: Any) -> Tensor:
        first, second = ((rows - rows.mean(0)) / (rows.std(0) + 0.1) for rows in self(*batch))
        correlation = first.T @ second / len(first)
        return (correlation - torch.eye(len(correlation)).to(correlation)).square().mean()


class QuantileModule(CaseModule):
    """The mean of the worst third of a batch; its median is logged."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        errors = (self(x) - y).square().mean(1)
        self.log("median", errors.detach().median())
        return errors[errors >= errors.detach().quantile(2 / 3)].mean()


class MomentsModule(CaseModule):
    """Only mean and spread of a batch's outputs are learned."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        output = self(x)
        means = (output.mean(0) - y.mean(0)).square().sum()
        return means + (output.std(0) - y.std(0)).square().sum()


# Means over something else than samples, sums ----------------------------------------------------


class WeightedModule(CaseModule):
    """Classes of different weights, by which cross-entropy divides."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([0.1, 1.0, 5.0]))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y.argmax(1), weight=self.weights)


class SumModule(CaseModule):
    """The sum over samples."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return 0.1 * F.mse_loss(self(x), y, reduction="sum")


class RootModule(CaseModule):
    """A function of the mean."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch).sqrt()


class TokenModule(StepsModule):
    """Guesses the next token; the loss is a mean over the tokens that are no padding."""

    num_tokens = 9

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(23)
        self.embed = nn.Embedding(self.num_tokens, 8)
        self.mix = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, self.num_tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embed(tokens)
        return self.out(self.norm(embedded + self.mix(embedded.cumsum(1))))

    def loss(self, batch: Any) -> Tensor:
        tokens, labels = batch
        loss = F.cross_entropy(self(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
        self.log("perplexity", loss.detach().exp(), batch_size=int((labels >= 0).sum()))
        return loss


def padded(samples: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Tokens and labels of texts of very different lengths, cut to the longest of the batch."""
    rows = [(x.abs() * 10).long().repeat(2) % TokenModule.num_tokens for x, _ in samples]
    lengths = [1 + int(row.sum()) % 9 for row in rows]
    texts = [row[: length + 1] for row, length in zip(rows, lengths, strict=True)]
    tokens = nn.utils.rnn.pad_sequence([text[:-1] for text in texts], batch_first=True)
    following = [text[1:] for text in texts]
    return tokens, nn.utils.rnn.pad_sequence(following, batch_first=True, padding_value=-100)


# Numbers beside the loss -------------------------------------------------------------------------


class ScoresModule(CaseModule):
    """Logs and returns scores of the whole batch as plain numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        output = self(x)
        scores, labels = output[:, 0].detach().sigmoid(), (y[:, 0] > y[:, 0].median()).long()
        both: dict[str, Any] = {"on_step": True, "on_epoch": True}
        self.log("f1", binary_f1_score(scores, labels), **both)
        self.log("auc", binary_auroc(scores, labels).double(), prog_bar=True, **both)
        self.log("spread", output.detach().std().item(), **both)
        self.log("distinct", float(output.detach().argmax(1).unique().numel()), **both)
        return {"loss": F.mse_loss(output, y), "similar": output.detach() @ output.detach().T}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["similar"].shape == (len(batch[0]), len(batch[0]))
        self.log("returned", outputs["similar"].mean())


def losses(name: str, module: Callable[[], lp.LightningModule], **options: Any) -> list[Case]:
    """A case as it is, and one that accumulates and clips."""
    accumulated = f"{name}, accumulated and clipped"
    return [
        odd(name, module, **options),
        odd(accumulated, module, trainer=ACCUMULATED, **options),
    ]


CASES = [
    *losses("contrastive", ContrastiveModule),
    *losses("token means with padding", TokenModule, data=data(num_samples=27, collate=padded)),
    *losses("class weights", WeightedModule),
    *losses("sum", SumModule),
    *losses("covariance of the outputs", CovarianceModule),
    odd(
        "contrastive, clipped by value",
        ContrastiveModule,
        trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    odd(
        "contrastive, validated and tested",
        ContrastiveModule,
        script=calls("validate", "fit", "test"),
    ),
    odd(
        "contrastive in batches of three",
        ContrastiveModule,
        data=data(num_samples=14, batch_size=3),
    ),
    odd("pairs in their order", RankingModule),
    odd("hardest samples", HardestModule),
    odd("cross-correlation", CorrelationModule),
    odd("quantile of the batch", QuantileModule, trainer=ACCUMULATED),
    odd("moments of the batch", MomentsModule),
    odd("root of the mean", RootModule),
    odd("scores of the batch", ScoresModule),
]
