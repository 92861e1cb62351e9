"""How far predicted steps of the recipes are from recorded ones, on real processes of this machine.

Every recipe trains on two processes (``--ranks``) and records some steps. Half of them, every other
one, are for the refit; the others are what is predicted. Columns:

- profile: the simulated step with the measured operators alone;
- + overheads: with what recorded steps cost besides (data, user's step, messages, optimizer), the
  operators as profiled;
- one step: everything refitted to the first recorded step;
- refit: to all the steps that are for it.

    python benchmarks/prediction.py
    python benchmarks/prediction.py --recipes dlrm --planners graphpipe --steps 40

Errors are those of the predicted step against the median of the recorded ones.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from hydra import compose, initialize_config_module

from lightning_gpp import GraphPipeStrategy, TimelineCallback
from lightning_gpp.jobs.train import build_recipe
from lightning_gpp.simulate import Timeline
from lightning_gpp.simulate.refit.from_timelines import refit
from lightning_gpp.strategy.recording.prediction import StepQuestion

WARM_UP, EVERY = 20, 4
"""Steps before the first recorded one, and from one to the next: recording disturbs the next."""

OPTIONS: dict[str, dict[str, Any]] = {
    "graphpipe": {"planner": "graphpipe"},
    "balanced": {"planner": "balanced", "num_microbatches": 4},
}
"""Name of a plan -> options of the strategy that give it; balanced plans have no replicas."""


class Prediction(TimelineCallback):
    """Records steps with what was asked of their plan, and prints a row of the table."""

    def __init__(self, name: str, num_steps: int, folder: str) -> None:
        steps = range(WARM_UP, WARM_UP + EVERY * num_steps, EVERY)
        super().__init__([*steps], folder, picture=False, trace=False, predict=False)
        self.name = name
        self.found: list[tuple[StepQuestion, Timeline]] = []

    def _show(self, trainer: pl.Trainer, timeline: Timeline, *_: object) -> None:
        question = StepQuestion.of(trainer.strategy.session.run.pipeline)
        if question is not None:
            self.found.append((question, timeline))

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


def cells(
    question: StepQuestion, known: Sequence[Timeline], others_s: Sequence[float]
) -> list[str]:
    """The cells of a row: the plan, what was recorded, predictions with their errors."""
    asked = question.program, question.plan, question.request
    everything = refit(known, *asked, skip_steps=0)
    cluster = everything.cluster(question.request.cluster)
    besides = replace(
        question,
        request=replace(question.request, cluster=cluster),
        step=everything.step_costs(question.plan, question.request.graph),
    )
    one = refit(known[:1], *asked, skip_steps=0)
    predicted_s = [
        question.predicted().step_s,
        besides.predicted().step_s,
        question.predicted(one).step_s,
        question.predicted(everything).step_s,
    ]
    low_s, middle_s, high_s = statistics.quantiles(others_s, n=4)
    replicas = max(stage.num_replicas for stage in question.plan.stages)
    return [
        f"{question.plan.num_stages} x {replicas}, {question.plan.num_microbatches}",
        f"{middle_s * 1e3:.1f} ({low_s * 1e3:.1f} to {high_s * 1e3:.1f}, {len(others_s)} steps)",
        *(f"{s * 1e3:.1f} ({(s / middle_s - 1) * 100:+.0f} %)" for s in predicted_s),
    ]


def train(recipe: str, plan: str, num_steps: int, num_ranks: int) -> None:
    """Trains a recipe as long as steps are to be recorded."""
    with initialize_config_module("lightning_gpp.configs", version_base=None):
        config = compose("config", [f"recipe={recipe}"])
    module, data = build_recipe(config)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            strategy=GraphPipeStrategy(start_method="spawn", cache=False, **OPTIONS[plan]),
            accelerator="cpu",
            devices=num_ranks,
            max_steps=WARM_UP + EVERY * num_steps,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Prediction(f"`{recipe}`, {plan}", num_steps, folder)],
        )
        trainer.fit(module, datamodule=data)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = ("multimodal", "dlrm", "gnn")
    parser.add_argument("--recipes", nargs="+", choices=names, default=[*names])
    parser.add_argument("--planners", nargs="+", choices=[*OPTIONS], default=[*OPTIONS])
    parser.add_argument("--steps", type=int, default=24, help="recorded steps, half of each kind")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {arguments.ranks} "
        f"processes with 1 thread each on {os.cpu_count()} cores; milliseconds per step\n"
    )
    print("| recipe, plan | stages x replicas, micro-batches | recorded | profile |", end="")
    print(" + overheads | one step | refit |\n|---|---|---|---|---|---|---|", flush=True)
    for recipe in arguments.recipes:
        for plan in arguments.planners:
            train(recipe, plan, arguments.steps, arguments.ranks)


if __name__ == "__main__":
    main()
