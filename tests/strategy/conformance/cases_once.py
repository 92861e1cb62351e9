"""User code around the forward runs once per batch, on the whole batch, whatever it does.

It may skip batches, leave the forward out, take batches that cannot be cut, count, print, log
and keep what it likes.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import default_collate
from torchmetrics.classification import MulticlassF1Score

from conformance.case import Bench, calls, odd
from conformance.modules import CaseData, CaseModule, data

EVERY_CALL = ("validate", "fit", "test", "predict")

# Steps that are skipped, or do without the forward -----------------------------------------------


class SkippingModule(CaseModule):
    """Returns None for some batches.

    Args:
        skipped: their numbers in the epoch.
        after_forward: whether the forward was called before that was decided.
    """

    def __init__(self, *skipped: int, after_forward: bool = False) -> None:
        super().__init__()
        self.skipped, self.after_forward = skipped, after_forward

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx not in self.skipped:
            return super().training_step(batch, batch_idx)
        if self.after_forward:
            self.log("skipped", self(batch[0]).detach().mean())
        return None


class OwnLossModule(CaseModule):
    """Every second loss is of a parameter outside of the forward, which gets no gradient then.

    Its momentum must rest, too: no gradient is something else than a gradient of zeros.

    Args:
        calls_forward: whether such a step calls the forward all the same.
        with_gradient: whether that call records a gradient.
    """

    def __init__(self, *, calls_forward: bool, with_gradient: bool = True) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.linspace(-1, 1, 3))
        self.calls_forward, self.with_gradient = calls_forward, with_gradient

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 2 == 0:
            return super().training_step(batch, batch_idx)
        wanted = batch[1].mean(0)
        if self.calls_forward:
            with torch.set_grad_enabled(self.with_gradient):
                wanted = wanted + self(batch[0]).detach().mean(0)
        loss = F.mse_loss(self.own, wanted)
        self.log("own_loss", loss)
        return loss


class NeverModule(OwnLossModule):
    """Training never calls the forward; validation does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, 1)


# Batches that the forward does not see -----------------------------------------------------------


class MixedModule(CaseModule):
    """Its loss reads everything in the batch; its forward one tensor, made of two."""

    def loss(self, batch: Any) -> Tensor:
        parts, notes = batch["parts"], batch["notes"]
        output = self(torch.cat([parts["head"][0], parts["tail"]], 1))
        lengths = torch.tensor([float(len(text)) for text in notes["texts"]]).to(output)
        bags = torch.stack([bag.sum() for bag in notes["bags"]])
        rows = torch.stack([torch.tensor(row).to(output).sum() for row in notes["rows"]])
        flat = torch.zeros_like(bags).index_add(0, batch["owner"], batch["flat"])
        wanted = batch["target"] + (bags + flat + 0.1 * rows)[:, None] * batch["scale"]
        errors = (output - wanted).square().mean(1) * lengths
        assert batch["name"] == "mixed" and batch["kinds"] == {"a", "b"} and batch["none"] is None
        return errors.sum() / lengths.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        size = len(batch["target"])
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=size)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), batch_size=len(batch["notes"]["texts"]))


def mixed(samples: Sequence[Any]) -> dict[str, Any]:
    """Text, ragged lists, sets, and a flat tensor of another number of entries."""
    x, y = default_collate(list(samples))
    counts = [1 + int(10 * row[0].abs()) % 4 for row in x]
    owner = torch.arange(len(x)).repeat_interleave(torch.tensor(counts))
    return {
        "name": "mixed",
        "kinds": {"a", "b"},
        "none": None,
        "flat": 0.1 * torch.arange(len(owner)).to(x).sin(),
        "owner": owner,
        "scale": torch.tensor([0.5, 0.25, 0.125]).to(x),
        "notes": {
            "texts": ["word " * count for count in counts],
            "bags": [0.1 * row[:count] for row, count in zip(x, counts, strict=True)],
            "rows": [list(range(count)) for count in counts],
        },
        "parts": {"head": [x[:, :2]], "tail": x[:, 2:]},
        "target": y,
    }


# Counting, printing, keeping ---------------------------------------------------------------------


class CountingModule(CaseModule):
    """Counts its steps and the samples they saw, prints, and keeps a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.seen: list[tuple[str, int, int]] = []
        self.running = 0.0

    def count(self, kind: str, batch: Any, batch_idx: int) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.seen.append((kind, batch_idx, len(batch[0])))
        print(f"user: {kind} {batch_idx}")  # noqa: T201
        self.print(f"user: {kind} {batch_idx} by self.print")

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.training:
            self.running = 0.9 * self.running + 0.1 * loss.item()
            self.log("running", self.running)
        self.counts["losses"] = self.counts.get("losses", 0) + 1
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count("train", batch, batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.count("sanity" if self.trainer.sanity_checking else "validate", batch, batch_idx)
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.count("test", batch, batch_idx)
        super().test_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.count("predict", batch, batch_idx)
        return super().predict_step(batch, batch_idx)


class CountingForwardsModule(CountingModule):
    """Two of three steps call the forward twice, the third never."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(2))

    def loss(self, batch: Any) -> Tensor:
        if len(self.seen) % 3 == 1:
            return self.own.square().sum()
        return super().loss(batch) + self(-batch[0]).square().mean()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().predict_step(batch, batch_idx)
        return found if batch_idx == 1 else torch.cat([found, self(batch[0][:2])])


def counted(bench: Bench) -> None:
    """Every call on the Trainer; what was counted, kept and printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        calls(*EVERY_CALL)(bench)
    if bench.trainer.is_global_zero:
        for name in ("counts", "seen", "running"):
            bench.on_rank_0[name] = getattr(bench.module, name)
        lines = [line for line in printed.getvalue().splitlines() if line.startswith("user: ")]
        bench.on_rank_0["printed"] = lines
    else:  # steps are rank 0's
        assert "user: " not in printed.getvalue()


# Logging -----------------------------------------------------------------------------------------


class LoggingModule(CaseModule):
    """Numbers of the whole batch, each by every rule for batches, and torchmetrics objects."""

    def __init__(self) -> None:
        super().__init__()
        kinds = ("fit", "val")  # a ModuleDict has a ``train`` of its own
        self.error = nn.ModuleDict({kind: torchmetrics.MeanAbsoluteError() for kind in kinds})
        self.classes = nn.ModuleDict({kind: MulticlassF1Score(3) for kind in kinds})
        self.spread = nn.ModuleDict({kind: torchmetrics.MeanMetric() for kind in kinds})
        self.largest = torchmetrics.MaxMetric()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        output = self(x)
        loss = F.mse_loss(output, y)
        self.log_all("fit" if self.training else "val", output.detach(), y)
        self.largest.update(loss.detach())
        self.log("updates", float(self.largest.update_count), reduce_fx="max")
        logger: Any = self.logger
        logger.log_metrics({"row/loss": loss.item(), "row/size": len(x)})
        return loss

    def log_all(self, kind: str, output: Tensor, y: Tensor) -> None:
        """Numbers, metrics by object and by value."""
        both: dict[str, Any] = {"on_step": True, "on_epoch": True}
        for rule in ("mean", "sum", "max", "min"):
            self.log(f"{kind}/median/{rule}", output.median(), reduce_fx=rule, **both)
            self.log(f"{kind}/spread/{rule}", output.std().item(), reduce_fx=rule, **both)
        largest = output.amax(0)
        self.log_dict({f"{kind}/{n}": largest[i] for i, n in enumerate("abc")}, **both)
        self.error[kind](output, y)
        self.log(f"{kind}/error", self.error[kind], **both)
        self.classes[kind].update(output, y.argmax(1))
        self.log(f"{kind}/classes", self.classes[kind], on_step=False, on_epoch=True)
        self.log(f"{kind}/by value", self.spread[kind](output.std()), **both)

    def on_train_epoch_end(self) -> None:
        self.log("fit/largest", self.largest.compute())
        self.largest.reset()


def note_metric(bench: Bench) -> None:
    """Fit and validate; what a metric holds afterwards."""
    calls("fit", "validate")(bench)
    if bench.trainer.is_global_zero:
        assert isinstance(bench.module, LoggingModule)
        held = bench.module.largest
        bench.on_rank_0["held"] = [float(held.compute()), held.update_count]


# Collectives ------------------------------------------------------------------------------------


class AskingModule(CaseModule):
    """Asks in steps, hooks and transfers for what collectives answer on one device."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Any] = []

    def ask(self, where: str) -> None:
        trainer, strategy = self.trainer, self.trainer.strategy
        value = torch.arange(3.0)
        self.answers += [
            where,
            Path(str(trainer.log_dir)) == Path(trainer.default_root_dir),
            strategy.broadcast({"epoch": trainer.current_epoch}),
            strategy.reduce(value),
            strategy.all_gather(value),
            self.all_gather({"value": value, "number": 2.5}),
            [strategy.reduce_boolean_decision(given, all=every) for given, every in _DECISIONS],
        ]

    def loss(self, batch: Any) -> Tensor:
        self.ask("loss before")
        loss = super().loss(batch)
        self.ask("loss after")
        return loss

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.ask("on_before_batch_transfer")
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.ask("on_after_batch_transfer")
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.ask("on_train_batch_start")

    def on_validation_epoch_end(self) -> None:
        self.ask("on_validation_epoch_end")

    def train_dataloader(self) -> Any:
        def collate(samples: Any) -> Any:
            self.ask("collate")
            return default_collate(samples)

        return CaseData(num_samples=27, collate=collate).loader(1)


_DECISIONS = ((True, True), (True, False), (False, True), (False, False))


def note_answers(bench: Bench) -> None:
    """Every call on the Trainer; what was answered."""
    bench.fit(train_dataloaders=None)
    calls("validate", "predict")(bench)
    if bench.trainer.is_global_zero:
        assert isinstance(bench.module, AskingModule)
        bench.on_rank_0["answers"] = bench.module.answers


CASES = [
    odd("skipped steps", lambda: SkippingModule(1, 3)),
    odd("first steps skipped", lambda: SkippingModule(0, 1)),
    odd("every step skipped", lambda: SkippingModule(0, 1, 2, 3)),
    odd("steps skipped after the forward", lambda: SkippingModule(0, 2, after_forward=True)),
    *(
        odd(
            f"steps {skipped} skipped while gradients accumulate",
            lambda skipped=skipped: SkippingModule(*skipped, after_forward=True),
            trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
        )
        for skipped in ((0, 3), (1, 2), (2, 3))
    ),
    odd("some steps without the forward", lambda: OwnLossModule(calls_forward=False)),
    odd("a loss that is not of the forward", lambda: OwnLossModule(calls_forward=True)),
    odd(
        "a loss that is not of the forward, without gradient",
        lambda: OwnLossModule(calls_forward=True, with_gradient=False),
    ),
    odd(
        "some steps without the forward, accumulated and clipped",
        lambda: OwnLossModule(calls_forward=False),
        trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    ),
    odd("training without the forward", lambda: NeverModule(calls_forward=False)),
    odd(
        "text, ragged lists and sets in the batch",
        MixedModule,
        data=data(num_samples=27, collate=mixed),
    ),
    odd("steps run once", CountingModule, script=counted),
    odd("steps with two calls or none run once", CountingForwardsModule, script=counted),
    odd(
        "steps run once while gradients accumulate",
        CountingModule,
        script=counted,
        trainer={"accumulate_grad_batches": 3, "num_sanity_val_steps": 0},
    ),
    odd(
        "collectives that only rank 0 enters",
        AskingModule,
        script=note_answers,
        trainer={"logger": False},
    ),
    odd("logged numbers of whole batches", LoggingModule, script=note_metric, tolerance=1e-6),
]
