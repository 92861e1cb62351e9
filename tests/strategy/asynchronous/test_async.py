"""Asynchronous training in processes: by definition, and with all that a Trainer does around it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as lp
import pytest
import torch
from helpers.delayed_updates import train_delayed, train_one_behind
from helpers.training import make_trainer, quiet, real_tensors
from helpers.workers import WorkerPool
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import DataLoader, Dataset

from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.weights.policies import POLICIES

CHAIN = StageGraph(
    3,
    (
        StageEdge(FEED, 0, ("x",), has_backward=False),
        StageEdge(0, 1, ("a",)),
        StageEdge(1, 2, ("b",)),
    ),
)
PLAN = [["layers.0"], ["layers.1"], ["layers.2"]]
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": lambda p: SGD(p, 0.05, momentum=0.9),
    "adam": lambda p: Adam(p, 0.01),
    "sgd": lambda p: SGD(p, 0.1),
}


class Layer(nn.Module):
    """A stage of the reference."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3, 3, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class Layers(lp.LightningModule):
    """Three of them; notes what its hooks and steps see."""

    def __init__(self, optimizer: str = "momentum") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(seed) for seed in range(3))
        self.optimizer = optimizer
        self.began: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.began.append(batch_idx)
        x, target = batch
        loss = (self(x) - target).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", (self(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self) -> Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


class Batches(Dataset):
    """Batches, and which of them were read."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.data = [
            tuple(torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(2))
            for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


@dataclass
class Seen:
    """What a rank saw."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    began: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class Watch(lp.Callback):
    """Notes the loss of every step."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.losses.append(float(trainer.callback_metrics["loss_step"]))
        self.seen.steps.append(trainer.global_step)


def fit(
    policy: str,
    optimizer: str,
    trainer: dict[str, Any],
    count: int = 8,
    resume: str | None = None,
    save: str | None = None,
    strategy: dict[str, Any] | None = None,
) -> Seen:
    """Arguments of the Trainer may be a dict of accumulation, and ``stops``, too."""
    seen, trainer = Seen(), dict(trainer)
    module = Layers(optimizer)
    loader: Any = DataLoader(Batches(count), batch_size=None)
    asked = {"schedule": "1f1b-async", "weights": policy, "plan": PLAN, "timeout": 100.0}
    callbacks: list[lp.Callback] = [Watch(seen)]
    if isinstance(trainer.get("accumulate_grad_batches"), dict):
        accumulates = trainer.pop("accumulate_grad_batches")
        callbacks.append(lp.callbacks.GradientAccumulationScheduler(accumulates))
    if "stops" in trainer:
        callbacks.append(lp.callbacks.EarlyStopping(trainer.pop("stops"), 1e9, patience=0))
    with quiet():
        host = make_trainer(
            asked | (strategy or {}),
            3,
            callbacks=callbacks,
            **{"precision": "64-true"} | trainer,
        )
        host.fit(module, loader, loader, ckpt_path=resume)
        if save is not None:
            host.save_checkpoint(save)
    seen.weights, seen.began = real_tensors(module), module.began
    seen.metrics = {name: float(value) for name, value in host.callback_metrics.items()}
    return seen


def expected(
    policy: str,
    optimizer: str,
    runs: list[int],
    count: int = 8,
    clip: float | None = None,
    per_update: Sequence[int] = (1,),
) -> tuple[Any, Any]:
    """Losses and weights of pipelines that fill anew after so many batches, each time."""
    weights = [layer.weight.detach() for layer in Layers().layers]
    batches = [Batches(count).data[i % count] for i in range(sum(runs))]
    make = OPTIMIZERS[optimizer]
    forgets = optimizer == "sgd"  # its state has no last step
    return train_delayed(
        CHAIN,
        weights,
        batches,
        policy,
        make,
        runs,
        forgets,
        clip,
        per_update,  # type: ignore[arg-type]
    )


def assert_trained(results: list[Seen], losses: list[float], weights: list[Tensor]) -> None:
    for result in results:
        assert result.losses == pytest.approx(losses, rel=1e-10)
    for stage, weight in enumerate(weights):
        name = f"layers.{stage}.weight"
        torch.testing.assert_close(results[0].weights[name], weight, rtol=1e-10, atol=1e-12)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", [p for p in POLICIES if not POLICIES[p].is_one_behind])
def test_two_epochs_by_definition(pool: WorkerPool, policy: str) -> None:
    """The pipeline drains at the end of an epoch; validation finds the weights of the moment."""
    results = pool.run(fit, policy, "momentum", {"max_epochs": 2}, num_ranks=3)
    losses, weights = expected(policy, "momentum", [8, 8])
    assert_trained(results, losses, weights)
    assert results[0].steps == list(range(1, 17))
    assert results[0].began == [*range(8), *range(8)]
    assert results[0].metrics.keys() >= {"loss_step", "loss_epoch", "validation"}
    assert results[0].metrics["loss_epoch"] == pytest.approx(sum(losses[8:]) / 8)


@pytest.mark.parametrize(
    "limits", [{"max_steps": 5}, {"limit_train_batches": 5, "max_epochs": 1}], ids=str
)
def test_a_run_that_ends_before_its_data_begins_no_other_batch(
    pool: WorkerPool, limits: dict[str, Any]
) -> None:
    results = pool.run(fit, "pipeoptim", "adam", limits, num_ranks=3)
    assert_trained(results, *expected("pipeoptim", "adam", [5]))
    assert results[0].began == list(range(5))


def test_validation_in_the_middle_of_an_epoch_changes_nothing(pool: WorkerPool) -> None:
    trainer = {"max_epochs": 1, "val_check_interval": 3}
    results = pool.run(fit, "pipeoptim", "momentum", trainer, num_ranks=3)
    assert_trained(results, *expected("pipeoptim", "momentum", [8]))


def test_stopping_early_forgets_what_is_in_flight(pool: WorkerPool) -> None:
    """After the second validation, in the middle of an epoch."""
    trainer = {"max_epochs": 3, "val_check_interval": 2, "stops": "validation"}
    results = pool.run(fit, "pipeoptim", "momentum", trainer, num_ranks=3)
    assert_trained(results, *expected("pipeoptim", "momentum", [4]))
    assert results[0].steps == [1, 2, 3, 4] and len(results[0].began) == 6


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_resuming_goes_on_exactly(pool: WorkerPool, tmp_path: Path, optimizer: str) -> None:
    file = str(tmp_path / "last.ckpt")
    once = {"max_epochs": 1}
    pool.run(fit, "pipeoptim", optimizer, once, 8, None, file, num_ranks=3)
    resumed = pool.run(fit, "pipeoptim", optimizer, {"max_epochs": 2}, 8, file, num_ranks=3)
    losses, weights = expected("pipeoptim", optimizer, [8, 8])
    assert_trained(resumed, losses[8:], weights)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("trainer", "strategy", "message"),
    [
        (
            {"accumulate_grad_batches": 2},
            {"weights": "spectrain"},
            "updates after every batch, but .* is 2: use weights='pipeoptim', or larger batches",
        ),
        ({}, {"weights": "2bw"}, "got accumulate_grad_batches=1, expected at least 2"),
        ({}, {"num_microbatches": 4}, "needs num_microbatches=1, got 4"),
        ({}, {"weights": "stale"}, "unknown policy of weights 'stale'; known: pipeoptim"),
        ({}, {"schedule": "gpipe"}, "is for schedule='1f1b-async', got schedule='gpipe'"),
    ],
)
def test_what_is_refused(
    pool: WorkerPool, trainer: dict[str, Any], strategy: dict[str, Any], message: str
) -> None:
    arguments = ("pipeoptim", "sgd", {"max_epochs": 1} | trainer, 8, None, None, strategy)
    for outcome in pool.outcomes(fit, *arguments, num_ranks=3):
        assert re.search(message, outcome.error)
        assert not outcome.leaked


@pytest.mark.parametrize("per_update", [2, 4])
def test_updates_that_are_one_behind(pool: WorkerPool, per_update: int) -> None:
    trainer = {"max_epochs": 1, "accumulate_grad_batches": per_update}
    results = pool.run(fit, "2bw", "adam", trainer, 12, num_ranks=3)
    weights = [layer.weight.detach() for layer in Layers().layers]
    losses, trained = train_one_behind(
        CHAIN, weights, Batches(12).data, per_update, OPTIMIZERS["adam"]
    )
    assert_trained(results, losses, trained)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("policy", "per_update", "limit", "runs"),
    [
        ("pipeoptim", 3, {"max_epochs": 2}, [8, 8]),  # updates of 3, 3 and 2 batches
        ("pipeoptim", {0: 1, 1: 2}, {"max_epochs": 2}, [8, 8]),
        ("stash", 3, {"max_steps": 2}, [6]),
    ],
)
def test_updates_of_several_batches(
    pool: WorkerPool, policy: str, per_update: Any, limit: dict[str, int], runs: list[int]
) -> None:
    """Predictions count updates, not batches; nothing is read ahead that no update takes."""
    trainer = limit | {"accumulate_grad_batches": per_update}
    results = pool.run(fit, policy, "momentum", trainer, num_ranks=3)
    each = [per_update] if isinstance(per_update, int) else list(per_update.values())
    assert_trained(results, *expected(policy, "momentum", runs, per_update=each))
    assert len(results[0].began) == sum(runs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["pipeoptim", "stash", "flush"])
def test_clipping_by_norm(pool: WorkerPool, policy: str) -> None:
    """A stage clips the norm of its own gradients; where the pipeline drains, that of all."""
    clip = 0.05  # some stages' gradients in some steps
    results = pool.run(
        fit, policy, "momentum", {"max_epochs": 1, "gradient_clip_val": clip}, num_ranks=3
    )
    unclipped = expected(policy, "momentum", [8])
    losses, weights = expected(policy, "momentum", [8], clip=clip)
    assert losses != unclipped[0]
    assert_trained(results, losses, weights)
