"""Evaluation steps see whole batches, whatever they do with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn

from conformance.case import Bench, Case
from conformance.modules import CaseModule


class WholeBatchModule(CaseModule):
    """Logs and keeps numbers that no mean over micro-batches gives."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanAbsoluteError()
        self.kept: list[Tensor] = []
        self.mixed: list[Tensor] = []  # of which other ranks get the numbers alone

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        output = self(x)
        loss = nn.functional.mse_loss(output, y)
        self.log("val_loss", loss)
        self.log("val_root", loss.sqrt(), on_step=True, on_epoch=True)
        self.log("val_median", output.median(), reduce_fx="max")
        self.log("val_total", output.sum(), reduce_fx="sum")
        self.log("val_size", float(len(x)), reduce_fx=torch.sum)
        self.log("val_by_number", loss, batch_size=batch_idx + 1)
        self.log("val_twice", loss, on_epoch=True)
        self.log("val_twice", 2 * loss, on_epoch=True)
        self.error(output, y)
        self.log("val_error", self.error, on_step=True, on_epoch=True)
        self.kept.append(output)
        self.mixed.append(output.mean() if batch_idx else output)
        return {"note": f"batch {batch_idx}", "largest": output.max().item(), "by": {1, len(x)}}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["note"] == f"batch {batch_idx}" and len(batch[0]) in outputs["by"]
        self.log("val_returned", outputs["largest"])

    def on_validation_epoch_end(self) -> None:
        outputs = torch.cat(self.kept)
        self.log("val_spread", outputs.std())
        self.log("val_number", float(len(outputs)))
        self.log("val_mixed", self.mixed[0].sum() + len(self.mixed))
        self.kept.clear()
        self.mixed.clear()


class PredictingModule(CaseModule):
    """Predicts in forms that cannot be joined, and some that could."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        output = self(batch[0])
        best = output.argmax(1)
        return {
            "output": output,
            "sorted": output.sort(dim=0).values,
            "classes": best.unique(),
            "names": np.array(["abc"[int(number)] for number in best]),
            "rows": [{"best": float(row.max()), "row": row} for row in output],
            "text": f"{len(best)} samples in batch {batch_idx}",
            "similar": output @ output.T,
            "nothing": None,
        }


class SeveralForwardsModule(CaseModule):
    """Calls the forward twice, once on another number of samples; not in every batch."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            return {"skipped": True}
        x, y = batch
        both = self(torch.cat([x, -x]))
        loss = nn.functional.mse_loss(self(x), y)
        self.log("val_loss", loss)
        self.log("val_odd", both.sum())
        if batch_idx == 2:
            self.log("val_last", self(x[:1] * 2).sum())
        return loss


class NoForwardModule(CaseModule):
    """Its validation and its prediction never call the forward."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_mean", batch[0].mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0].sum()


class SimilarityModule(CaseModule):
    """Its forward also compares the samples of a batch; only validation looks at that."""

    def forward(self, x: Tensor) -> Any:
        output = super().forward(x)
        similar = (output @ output.T).softmax(1)
        return {"output": output, "similar": similar, "spread": output.std()}

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x)["output"], y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        found = self(x)
        self.log("val_loss", nn.functional.mse_loss(found["output"], y))
        self.log("val_spread", found["spread"])
        self.log("val_similar", found["similar"].diagonal().mean())


class CentringModule(CaseModule):
    """A row per sample, but every row depends on the others; training looks at the other output."""

    def forward(self, x: Tensor) -> Any:
        output = super().forward(x)
        return output, output - output.mean(0, keepdim=True)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x)[0], y)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_centred", self(batch[0])[1].abs().mean())


class TransposingModule(CaseModule):
    """Its forward takes the samples as columns."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x.transpose(0, 1)), y)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0].transpose(0, 1))


class AuxiliaryModule(CaseModule):
    """Its forward returns a mean over the batch, a constant and a number beside the output."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Any:
        output = super().forward(x)
        return output / self.temperature, output.square().mean(), self.temperature, 3

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        output, auxiliary, _, number = self(x)
        return nn.functional.mse_loss(output, y) + 0.01 * number * auxiliary


def sanity_then_all(bench: Bench) -> None:
    bench.fit()
    bench.validate()
    bench.test()
    bench.predict()


def predict(bench: Bench) -> None:
    bench.predict()


CASES = [
    Case("numbers over whole batches", module=WholeBatchModule, script=sanity_then_all),
    Case("predictions of every kind", module=PredictingModule, script=predict),
    Case("several forwards, or none", module=SeveralForwardsModule),
    Case("no forward at all", module=NoForwardModule, script=sanity_then_all),
    Case("samples that are compared in forward", module=SimilarityModule),
    Case("samples that are centred in forward", module=CentringModule, script=sanity_then_all),
    Case("samples in the second dimension", module=TransposingModule, script=sanity_then_all),
    Case("a mean and a constant beside the output", module=AuxiliaryModule),
]
