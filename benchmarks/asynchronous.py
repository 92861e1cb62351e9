"""Steps of an asynchronous pipeline against synchronous ones, in real processes.

A chain of equal layers with Adam is cut into as many stages as there are processes, one thread
each. All ways run in turn, some times; a row's ``ratio`` is the median over the turns of its step
over that of one device. ``bound`` is the busiest stage's part of one device's step: what a pipeline
without bubbles and without messages would take where every process has a core of its own (with more
processes than cores nothing can reach it) and memory to itself. ``apart`` is that bound measured:
as many processes beside each other, each of which trains the layers of a stage by itself, on data
of its own and without a message; the longest of them. The column ``of apart`` is that over the
way's step, of the same turn. The second table has what a prediction costs in one process that has
the layers of a stage: the same steps with and without it, in pairs; ``memory`` is what its passes
over the parameters would take at the pace at which these are copied.

    python benchmarks/asynchronous.py                     # two processes
    python benchmarks/asynchronous.py --devices 4 --turns 5
    python benchmarks/asynchronous.py --devices 1 --turns 0   # predictions of all layers alone
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpp import GraphPipeStrategy
from lightning_gpp.strategy import single_device
from lightning_gpp.text_table import text_table
from lightning_gpp.weights.last_steps import LastSteps
from lightning_gpp.weights.policies import POLICIES, Place
from lightning_gpp.weights.versions import StageWeights

WIDTH, LAYERS, BATCH = 768, 8, 256

OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int]] = {
    "SGD, momentum": (lambda parameters: torch.optim.SGD(parameters, 1e-3, momentum=0.9), 4),
    "Adam": (lambda parameters: torch.optim.Adam(parameters, 1e-4), 6),
}
"""With how often a prediction goes through memory as large as the parameters."""

COPY_PASSES = 3
"""Reads them, fetches the target, and writes it."""


class Chain(pl.LightningModule):
    """Equal layers."""

    def __init__(self, count: int = LAYERS, *, is_first: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.is_first = is_first

    def forward(self, x: Tensor) -> Tensor:
        """All layers, one after the other."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """A mean over samples."""
        x = batch[0] if self.is_first else batch[0].requires_grad_()
        return (self(x) - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One whose steps are predicted from its state."""
        return torch.optim.Adam(self.parameters(), 1e-4)


class Clock(pl.Callback):
    """Logs the mean seconds of the steps in the middle of an epoch."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """A step ends."""
        self.ends.append(time.perf_counter())

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Neither the first fifth, in which a pipeline is built and fills, nor the last one."""
        skip = len(self.ends) // 5
        middle_s = self.ends[-1 - skip] - self.ends[skip]
        pl_module.log("step_s", middle_s / (len(self.ends) - 1 - 2 * skip))


def step_s(strategy: Any, num_devices: int, num_steps: int, chain: Chain | None = None) -> float:
    """Mean seconds of the steps in the middle of a fit, when the pipeline is full."""
    torch.manual_seed(0)
    data = TensorDataset(*(torch.randn(num_steps * BATCH, WIDTH) for _ in range(2)))
    trainer = pl.Trainer(
        strategy=strategy,
        devices=num_devices,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Clock()],
    )
    trainer.fit(chain or Chain(), DataLoader(data, BATCH))
    return float(trainer.callback_metrics["step_s"])


def apart_s(num_devices: int, num_steps: int) -> float:
    """The longest mean step of processes that each train a stage's layers, all at the same time.

    All but the first stage compute the gradient of their input, too.
    """
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()

    def train(number: int) -> None:
        chain = Chain(LAYERS // num_devices, is_first=not number)
        found.put(step_s(single_device("cpu"), 1, num_steps, chain))

    processes = [context.Process(target=train, args=(i,)) for i in range(num_devices)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(found.get() for _ in processes)


def ways(num_devices: int) -> dict[str, dict[str, Any]]:
    """Name -> options of the strategy."""
    each = LAYERS // num_devices
    plan = [[f"layers.{i * each + j}" for j in range(each)] for i in range(num_devices)]
    base = {"plan": plan, "start_method": "fork", "timeout": 120.0}
    found: dict[str, dict[str, Any]] = {
        f"gpipe, {m} micro-batches": base | {"schedule": "gpipe", "num_microbatches": m}
        for m in (num_devices, 4 * num_devices)
    }
    for policy in ("flush", "pipeoptim", "stash", "none"):
        found[f"async {policy}"] = base | {"schedule": "1f1b-async", "weights": policy}
    return found


def stepping(policy: str, optimizer: str, num_layers: int) -> tuple[Chain, Callable[..., float]]:
    """Layers, and what takes a step with their weights by a policy and gives its seconds.

    They are those of the processor, so that other processes count little.
    """
    chain = Chain(num_layers)
    stepped = OPTIMIZERS[optimizer][0](chain.parameters())
    weights = StageWeights(POLICIES[policy], dict(chain.named_parameters()), [LastSteps(stepped)])

    def step(x: Tensor) -> float:
        start = time.thread_time()
        found = weights.forward(Place(1, 1, 1))
        with found.saving:
            out = functional_call(chain, dict(found.weights), (x,))
        out.square().mean().backward()
        stepped.step()
        stepped.zero_grad()
        return time.thread_time() - start

    return chain, step


def prediction(optimizer: str, num_layers: int, num_samples: int) -> tuple[str, ...]:
    """By how much steps with all weights predicted are longer than with those of the moment.

    Both are taken in turn, so that caches hold what they hold in training, and in both orders.
    """
    chain, plain = stepping("none", optimizer, num_layers)
    _, predicted = stepping("pipeoptim", optimizer, num_layers)
    weights = [parameter.detach() for parameter in chain.parameters()]
    copies = [torch.zeros_like(weight) for weight in weights]
    x, more, memory = torch.randn(num_samples, WIDTH), [], []
    for pair in range(-10, 300):
        if pair % 2:
            plain_s, predicted_s = plain(x), predicted(x)
        else:
            predicted_s, plain_s = predicted(x), plain(x)
        start = time.thread_time()
        torch._foreach_copy_(copies, weights)
        copied_s = time.thread_time() - start
        if pair >= 0:
            more.append(predicted_s / plain_s - 1)
            memory.append(OPTIMIZERS[optimizer][1] / COPY_PASSES * copied_s / plain_s)
    first, middle, third = statistics.quantiles(more, n=4)
    spread = f"{first:.1%} to {third:.1%}"
    bound = f"{statistics.median(memory):.1%}"
    return optimizer, str(num_samples), f"{middle:.1%}", spread, bound


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_gpp"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if options.turns:
        print_steps(options.devices, options.turns, options.steps)
    print_predictions(LAYERS // options.devices)


def print_steps(num_devices: int, turns: int, num_steps: int) -> None:
    """All ways, in turn."""
    found: dict[str, list[float]] = {}
    for _ in range(turns):
        alone_s = step_s(single_device("cpu"), 1, num_steps)
        taken_s = apart_s(num_devices, num_steps)
        found.setdefault("apart", []).append(taken_s / alone_s)
        for name, arguments in ways(num_devices).items():
            taken_s = step_s(GraphPipeStrategy(**arguments), num_devices, num_steps)
            found.setdefault(name, []).append(taken_s / alone_s)
    print(
        f"{LAYERS} layers of {WIDTH}, batches of {BATCH}, {num_devices} processes of one "
        f"thread, {turns} turns, torch {torch.__version__}, {platform.machine()}; "
        f"one device: {1e3 * alone_s:.0f} ms a step, bound {1 / num_devices:.2f}"
    )
    rows = []
    for name, ratios in found.items():
        of_apart = [a / r for a, r in zip(found["apart"], ratios, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append(
            (name, f"{statistics.median(ratios):.2f}", spread, f"{statistics.median(of_apart):.0%}")
        )
    print(text_table(("way", "ratio", "spread", "of apart"), rows))


def print_predictions(num_layers: int) -> None:
    """What a prediction costs, in one process."""
    rows = [
        prediction(optimizer, num_layers, num_samples)
        for optimizer in OPTIMIZERS
        for num_samples in (BATCH, 2 * BATCH)
    ]
    print(f"a prediction of {num_layers} layers of {WIDTH}, of a step:")
    print(text_table(("optimizer", "samples", "median", "middle half", "memory"), rows))


if __name__ == "__main__":
    main()
