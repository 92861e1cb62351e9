"""How far what is said of a step is from what it takes: the recipes on processes of this machine.

``steps``: every recipe trains on two processes (``--ranks``) and records some steps. Half of them,
every other one, are for the refit; the others are what is predicted. Columns:

- profile: the simulated step with the measured operators alone;
- one step: everything refitted to the first recorded step;
- refit: to all the steps that are for it.

``verdict``: every recipe trains on those processes, nothing known of earlier runs, and then in one
process with as many threads. Columns:

- planned: a step by the plan, from operators and messages alone, and how far it is from a batch;
- said: what a batch takes, as the verdict says it (median of the first second of batches);
- batch: the median of the batches after those, and how far what was said is from it;
- one process, said: what the verdict says of one process, from the measured operators and
  the rest of a batch;
- one process: its median batch, and how far what was said is from it.

::

    python benchmarks/prediction.py
    python benchmarks/prediction.py steps --recipes dlrm --planners graphpipe --steps 40
    python benchmarks/prediction.py verdict --busy 1  # beside so many processes that compute
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra import compose, initialize_config_module
from measuring import StepTimes, leave, parser, quiet, trainer

from lightning_gpp import GraphPipeStrategy, TimelineCallback
from lightning_gpp.jobs.train import build_recipe
from lightning_gpp.simulate import Timeline
from lightning_gpp.simulate.recorded import refit
from lightning_gpp.strategy.recording.step_reports import Question
from lightning_gpp.strategy.report import verdict_on

RECIPES = ("multimodal", "dlrm", "gnn")
WARM_UP, EVERY = 20, 4
"""Steps before the first that counts, and from one recorded to the next: recording disturbs it."""

OPTIONS: dict[str, dict[str, Any]] = {
    "graphpipe": {"planner": "graphpipe"},
    "balanced": {"planner": "balanced", "num_microbatches": 4},
}
"""Name of a plan -> options of the strategy that give it; balanced plans have no replicas."""


def train(recipe: str, strategy: Any, num_ranks: int, num_steps: int, callback: Any) -> None:
    """Trains a recipe for so many steps."""
    with initialize_config_module("lightning_gpp.configs", version_base=None):
        config = compose("config", [f"recipe={recipe}"])
    module, data = build_recipe(config)
    trainer(
        strategy, num_ranks, max_steps=num_steps, limit_val_batches=0, callbacks=[callback]
    ).fit(module, datamodule=data)


def ours(**options: Any) -> GraphPipeStrategy:
    """A strategy that knows nothing of earlier runs."""
    return GraphPipeStrategy(start_method="spawn", cache=False, **options)


def off(said_s: float, took_s: float) -> str:
    """How far what was said is from what it took."""
    return f"({(said_s / took_s - 1) * 100:+.0f} %)"


# Recorded steps -----------------------------------------------------------------------------


class Prediction(TimelineCallback):
    """Records steps with what was asked of their plan, and prints a row of the table."""

    def __init__(self, name: str, num_steps: int, folder: str) -> None:
        steps = range(WARM_UP, WARM_UP + EVERY * num_steps, EVERY)
        super().__init__([*steps], folder, picture=False, page=False)
        self.name = name
        self.found: list[tuple[Question, Timeline]] = []

    def take(self, run: Any, step: int, timeline: Timeline | None, why_not: str) -> None:
        """Keeps it for the row."""
        self._done.add(step)
        if timeline is not None:
            with contextlib.suppress(ValueError):  # a mini-batch that was too small for the plan
                self.found.append((Question.of(run.built, timeline), timeline))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prints on rank 0, which is a process of its own."""
        if trainer.is_global_zero:
            print(self.row(), flush=True)

    def row(self) -> str:
        """The recipe's line of the table; steps with smaller mini-batches do not count."""
        sizes = Counter(question.request.minibatch_size for question, _ in self.found)
        full = sizes.most_common(1)[0][0]
        found = [(q, t) for q, t in self.found if q.request.minibatch_size == full]
        question = found[0][0]
        known, others = [t for _, t in found[::2]], [t.step_s for _, t in found[1::2]]
        return "| " + " | ".join((self.name, *cells(question, known, others))) + " |"


def cells(question: Question, known: Sequence[Timeline], others_s: Sequence[float]) -> list[str]:
    """The cells of a row: the plan, what was recorded, predictions with their errors."""
    asked = question.program, question.plan, question.request
    predicted_s = [
        question.predicted().step_s,
        question.predicted(refit(known[:1], *asked)).step_s,
        question.predicted(refit(known, *asked)).step_s,
    ]
    low_s, middle_s, high_s = statistics.quantiles(others_s, n=4)
    replicas = max(stage.num_replicas for stage in question.plan.stages)
    return [
        f"{question.plan.num_stages} x {replicas}, {question.plan.num_microbatches}",
        f"{middle_s * 1e3:.1f} ({low_s * 1e3:.1f} to {high_s * 1e3:.1f}, {len(others_s)} steps)",
        *(f"{s * 1e3:.1f} {off(s, middle_s)}" for s in predicted_s),
    ]


def print_steps(given: argparse.Namespace) -> None:
    """The table of recorded steps."""
    print("| recipe, plan | stages x replicas, micro-batches | recorded | profile |", end="")
    print(" one step | refit |\n|---|---|---|---|---|---|", flush=True)
    for recipe in given.recipes:
        for plan in given.planners:
            with tempfile.TemporaryDirectory() as folder:
                callback = Prediction(f"`{recipe}`, {plan}", given.steps, folder)
                num_steps = WARM_UP + EVERY * given.steps
                train(recipe, ours(**OPTIONS[plan]), given.ranks, num_steps, callback)


# The verdict --------------------------------------------------------------------------------


class Batches(StepTimes):
    """Leaves the median batch after the verdict, and what was said of it."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """A batch begins; those before the verdict do not count."""
        super().on_train_batch_start()
        strategy = trainer.strategy
        if isinstance(strategy, GraphPipeStrategy) and strategy.reports.batch_times is None:
            self.num_warmup = max(WARM_UP, len(self.begun))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Rank 0 may be a process of its own."""
        if not trainer.is_global_zero:
            return
        found, strategy = [statistics.median(self.steps())], trainer.strategy
        if isinstance(strategy, GraphPipeStrategy):
            times = strategy.reports.batch_times
            verdict = verdict_on(strategy.session.run.pipeline.planned, strategy.settings)
            assert times is not None and times.own_s is not None, "it needs more batches"
            found += [verdict.step_s, times.batch_s, times.own_s + verdict.one_device_s]
        leave(self.folder, 0, found)


def said_and_took(recipe: str, strategy: Any, num_ranks: int, num_batches: int) -> list[float]:
    """Seconds of a batch, and what was said of them."""
    with tempfile.TemporaryDirectory() as folder:
        train(recipe, strategy, num_ranks, num_batches, Batches(WARM_UP, folder))
        found: list[float] = json.loads(Path(folder, "0.json").read_text())
        return found


def print_verdicts(given: argparse.Namespace) -> None:
    """The table of verdicts."""
    print("| recipe | planned | said | batch | one process, said | one process |")
    print("|---|---|---|---|---|---|", flush=True)
    with busy(given.busy):
        for recipe in given.recipes:
            batch_s, planned_s, said_s, one_said_s = said_and_took(
                recipe, ours(), given.ranks, given.batches
            )
            (one_s,) = said_and_took(recipe, "auto", 1, given.batches)
            ms = [f"{each * 1e3:.1f}" for each in (planned_s, said_s, batch_s, one_said_s, one_s)]
            ms[0] += f" {off(planned_s, batch_s)}"
            ms[2] += f" {off(said_s, batch_s)}"
            ms[4] += f" {off(one_said_s, one_s)}"
            print(f"| `{recipe}` | {' | '.join(ms)} |", flush=True)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Beside so many processes that compute all the time."""
    processes = [multiprocessing.Process(target=compute, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    yield
    for process in processes:
        process.kill()


def compute() -> None:
    """Without end."""
    while True:
        pass


TABLES = {"steps": print_steps, "verdict": print_verdicts}


def main() -> None:
    """The command."""
    asks = parser(__doc__)
    asks.add_argument("tables", nargs="*", default=[*TABLES], help=f"of {', '.join(TABLES)}")
    asks.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    asks.add_argument("--planners", nargs="+", choices=[*OPTIONS], default=[*OPTIONS])
    asks.add_argument("--steps", type=int, default=24, help="recorded steps, half of each kind")
    asks.add_argument("--batches", type=int, default=500, help="of a verdict's training")
    asks.add_argument("--ranks", type=int, default=2)
    asks.add_argument("--busy", type=int, default=0, help="other processes beside the verdict")
    given = asks.parse_args()
    quiet()
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {given.ranks} processes "
        f"with 1 thread each on {os.cpu_count()} cores, {given.busy} others; milliseconds\n"
    )
    for table in given.tables:
        TABLES[table](given)


if __name__ == "__main__":
    main()
