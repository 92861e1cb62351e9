"""A fit with a TimelineCallback, as a rank of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as lp
from torch.utils.data import DataLoader

from helpers.faults import FailOnRank
from helpers.models import DataSpec, ExportableModel
from helpers.training import MemoryLogger, make_trainer, quiet
from lightning_gpp import TimelineCallback
from lightning_gpp.runtime.run_state import ActionRecord
from lightning_gpp.simulate import Timeline
from lightning_gpp.strategy.recording.step_reports import StepReport


@dataclass
class TimelineRun:
    """What a rank has after the fit.

    Attributes:
        timelines: step -> timeline (rank 0).
        program: text of the actions that this rank runs for a mini-batch.
        logged: rows of the logger (rank 0).
        users_records: how many records the user's own ``on_record`` got.
        recorder_is_on: after the fit.
        reports: step -> how it compares with its predictions (rank 0).
        notes: on the plan (rank 0).
    """

    timelines: dict[int, Timeline]
    program: list[str] = field(default_factory=list)
    logged: list[dict[str, float]] = field(default_factory=list)
    users_records: int = 0
    recorder_is_on: bool = False
    reports: dict[int, StepReport] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def fit_with_timeline(
    num_ranks: int,
    callback: dict[str, Any],
    *,
    num_steps: int = 4,
    num_samples: int = 80,
    fail_on: int | None = None,
    plan: Any = None,
    costs: Any = None,
    schedule: str | None = None,
    **trainer_arguments: Any,
) -> TimelineRun:
    """Trains a model of two towers, with a plan of its own or a given one."""
    timeline = TimelineCallback(**callback)
    others: list[lp.Callback] = [] if fail_on is None else [FailOnRank(fail_on, "raise")]
    logger = MemoryLogger()
    records: list[ActionRecord] = []
    run = TimelineRun(timeline.timelines, reports=timeline.reports)
    with quiet():
        trainer = make_trainer(
            {
                "num_microbatches": 4,
                "timeout": 100.0,
                "plan": plan,
                "costs": costs,
                "schedule": schedule,
            },
            num_ranks,
            max_steps=num_steps,
            logger=logger,
            callbacks=[*others, timeline, _Keep(run)],
            **trainer_arguments,
        )
        strategy: Any = trainer.strategy
        strategy.on_record = records.append
        data = DataSpec(num_samples=num_samples, num_inputs=2).loader().dataset
        validation = DataLoader(data, 40)
        module = ExportableModel().double()
        trainer.fit(module, DataLoader(data, 8), validation)
    run.logged, run.users_records = logger.rows, len(records)
    return run


class _Keep(lp.Callback):
    """Keeps what is gone after the fit."""

    def __init__(self, run: TimelineRun) -> None:
        self.run = run

    def on_train_end(self, trainer: lp.Trainer, pl_module: lp.LightningModule) -> None:
        session: Any = trainer.strategy.session.run  # type: ignore[attr-defined]
        program = session.pipeline.last_trained
        device = session.pipeline.rank_of_device.index(trainer.global_rank)
        self.run.program = [str(action) for action in program.before_update(device)]
        self.run.recorder_is_on = session.recorder.is_on
        if session.pipeline.planned is not None:
            self.run.notes = session.pipeline.planned.notes


def fit_on_one_device(folder: Path) -> list[str]:
    """Trains without the strategy; returns the texts of the warnings about timelines."""
    import warnings

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer = make_trainer(
            None, max_steps=2, callbacks=[TimelineCallback((0,), dirpath=folder)]
        )
        data = DataSpec(num_samples=80, num_inputs=2).loader()
        trainer.fit(ExportableModel().double(), data)
    return [str(w.message) for w in seen if "TimelineCallback" in str(w.message)]
