"""Shares of two devices of which one is busy with something else: HAP against even shares.

Two processes of one thread, each on a core of its own. On the core of the second one another
process computes all the time, so that it gets half of the core: a device of half the speed. The
recipes' models, wider than by default, train with even shares and with HAP's, which are found from
speeds that the ranks measure when training begins. Ways alternate in rounds; printed are medians of
steps, and ratios within a round.

    python benchmarks/hap_unequal.py                 # Linux, two cores that are otherwise idle
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from measuring import StepTimes, leave, of_ranks, parser, quiet, spread, trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_gpp.common.text_table import text_table
from lightning_gpp.recipes.dlrm import DLRM
from lightning_gpp.recipes.multimodal import MultimodalClassifier
from lightning_gpp.strategy import HAPStrategy

STEPS, WARM_UP, SAMPLES = 12, 3, 512
MODELS = ("dlrm", "multimodal")
_CORES = "BENCHMARK_CORES"
WAYS: dict[str, dict[str, Any] | None] = {
    "one process": None,
    "even shares": {"planner": "data_parallel", "shares": [0.5, 0.5]},
    "HAP": {"planner": "hap"},
}


def task(name: str) -> tuple[pl.LightningModule, list[Any]]:
    """A model and one batch."""
    torch.manual_seed(0)
    if name == "dlrm":
        tables = {f"table{i}": 10_000 for i in range(8)}
        module: pl.LightningModule = DLRM(
            64, tables, embedding_width=128, bottom_widths=[2048, 1024], top_widths=[2048, 1024]
        )
        categories = {key: torch.randint(rows, (SAMPLES,)) for key, rows in tables.items()}
        clicked = torch.randint(2, (SAMPLES,)).float()
        return module, [(torch.randn(SAMPLES, 64), categories, clicked)]
    views = {f"view{i}": 256 for i in range(4)}
    module = MultimodalClassifier(views, 10, encoder_width=768, encoder_depth=4)
    given: dict[str, Tensor] = {key: torch.randn(SAMPLES, size) for key, size in views.items()}
    return module, [(given, torch.randint(10, (SAMPLES,)))]


def fit(model: str, way: str, folder: str) -> None:
    """Trains in the way that is asked for, and writes what it saw; all ranks come here."""
    cores = json.loads(os.environ[_CORES])
    os.sched_setaffinity(0, {cores[int(os.environ.get("LOCAL_RANK", 0))]})
    module, batches = task(model)
    options = WAYS[way]
    strategy: Any = "auto"
    if options is not None:
        strategy = HAPStrategy(cache=False, start_method="popen", **options)
    trainer(
        strategy,
        1 if options is None else 2,
        max_steps=STEPS,
        callbacks=[Shares(WARM_UP, folder)],
    ).fit(module, DataLoader(batches * STEPS, batch_size=None))


class Shares(StepTimes):
    """Rank 0 leaves the shares, too."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leaves the steps and the shares."""
        self.on_train_batch_start()
        is_ours = isinstance(trainer.strategy, HAPStrategy)
        shares = trainer.strategy.program.shares if is_ours else []
        leave(self.folder, trainer.global_rank, (statistics.median(self.steps()), shares))


def compare(model: str, rounds: int) -> list[list[str]]:
    """Rows of a model."""
    found: dict[str, list[tuple[float, list[float]]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            (left,) = of_ranks(["--fit", model, way])
            found[way].append(left)
    even = [seconds for seconds, _ in found["even shares"]]
    rows = []
    for way, each in found.items():
        ratios = [a / seconds for a, (seconds, _) in zip(even, each, strict=True)]
        shares = each[-1][1]
        rows.append(
            [
                model,
                way,
                f"{1000 * statistics.median(seconds for seconds, _ in each):.0f} ms",
                spread(ratios),
                " : ".join(f"{share:.2f}" for share in shares),
            ]
        )
    return rows


def main() -> None:
    """Measures all models with the second core busy."""
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    arguments.add_argument("--fit", nargs=3, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    quiet()
    if options.fit is not None:
        fit(*options.fit)
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed")
    os.environ[_CORES] = json.dumps(cores)
    burden = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(burden.pid, {cores[1]})
    try:
        rows = [row for model in options.models for row in compare(model, options.rounds)]
    finally:
        burden.kill()
    header = ["model", "", "step", "times as fast as even", "shares"]
    print(text_table(header, rows, left={"model", ""}))


if __name__ == "__main__":
    main()
