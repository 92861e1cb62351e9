"""What a step costs beside its arithmetic, by modules, logged values, micro-batches and ranks.

The model is tiny, so nearly all of a step is overhead. Every line is a training of its own in fresh
processes: the step's processor time on rank 0 (and on the rank that needs most of the others), the
tenth percentile of its steps, which other work on the machine disturbs least. ``plain`` is
Lightning without a strategy on one process.

    python benchmarks/overhead.py                  # all curves, some minutes
    python benchmarks/overhead.py modules logged
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

DEFAULTS = {"ranks": 1, "modules": 0, "logged": 0, "microbatches": 1, "emulated": 0}
CURVES: dict[str, list[dict[str, int]]] = {
    "modules": [{"modules": n} for n in (10, 100, 1000, 10000)],
    "modules, two ranks": [{"ranks": 2, "modules": n} for n in (10, 100, 1000, 10000)],
    "logged": [{"logged": n} for n in (0, 1, 10, 100)],
    "logged, two ranks": [{"ranks": 2, "logged": n} for n in (0, 1, 10, 100)],
    "microbatches": [{"ranks": 2, "microbatches": n} for n in (1, 4, 16, 64)],
    "ranks": [{"ranks": n} for n in (1, 2, 4)],
    "ranks, emulated": [{"ranks": n, "emulated": 1} for n in (1, 2, 4, 8)],
}
NUM_STEPS, NUM_WARMUP = 120, 30


def train(
    folder: str, ranks: int, modules: int, logged: int, microbatches: int, emulated: int
) -> None:
    """Trains; every rank leaves its processor seconds of each step in a file.

    Args:
        folder: for the files.
        ranks: processes; 0 for plain Lightning.
        modules: beside those that are used, each with a parameter and an attribute.
        logged: calls of ``self.log`` in a step.
        microbatches: of a mini-batch.
        emulated: whether devices are GPUs of Summit, emulated.
    """
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

    from lightning_gpp import GraphPipeStrategy

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.rate = nn.Parameter(torch.ones(2)), 0.5

    class Chain(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(max(1, ranks))))
            self.unused = nn.ModuleList(Unused() for _ in range(modules))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layers(x)
            return y

        def training_step(self, batch: Tensor) -> Tensor:
            loss = self(batch).square().mean()
            for number in range(logged):
                self.log(f"loss {number}", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Times(Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            self.ends.append(time.process_time())
            if len(self.ends) == NUM_STEPS:
                steps = [b - a for a, b in zip(self.ends[NUM_WARMUP:], self.ends[NUM_WARMUP + 1 :])]
                file = Path(folder, f"{trainer.global_rank}.json")
                file.write_text(json.dumps(sorted(steps)[len(steps) // 10]))

    plan = [[f"layers.{number}"] for number in range(ranks)]
    cluster = "summit" if emulated else None
    ours = GraphPipeStrategy(num_microbatches=microbatches, plan=plan, cluster=cluster)
    trainer = Trainer(
        strategy=ours if ranks else "auto",
        accelerator="emulated" if ranks and emulated else "cpu",
        devices=max(1, ranks),
        max_steps=NUM_STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Times()],
    )
    batches = [torch.randn(64, 16)] * NUM_STEPS
    trainer.fit(Chain(), DataLoader(batches, batch_size=None))


def measured(asked: dict[str, int]) -> list[float]:
    """Processor seconds of a step on every rank, from a training in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--here", folder, *map(str, asked.values())]
        subprocess.run(command, check=True, capture_output=True)
        found = [Path(folder, f"{rank}.json") for rank in range(max(1, asked["ranks"]))]
        return [json.loads(file.read_text()) for file in found]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("curves", nargs="*", help=f"of {', '.join(CURVES)}; by default all")
    parser.add_argument("--here", nargs=1 + len(DEFAULTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        train(arguments.here[0], *map(int, arguments.here[1:]))
        return
    if unknown := [name for name in arguments.curves if name not in CURVES]:
        parser.error(f"no curve {', '.join(unknown)}; there are {', '.join(CURVES)}")
    for name in arguments.curves or CURVES:
        print(f"{name:>20}   plain  rank 0  others (ms of processor time, a step)")
        for options in CURVES[name]:
            asked = DEFAULTS | options
            ours_s, plain_s = measured(asked), measured(asked | {"ranks": 0})
            seconds = [plain_s[0], ours_s[0], *([max(ours_s[1:])] if ours_s[1:] else [])]
            shown = " ".join(f"{1e3 * second:7.2f}" for second in seconds)
            print(f"{options[name.partition(',')[0]]:>20} {shown}", flush=True)
        print(flush=True)


if __name__ == "__main__":
    main()
