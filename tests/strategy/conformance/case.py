"""A case of the conformance table, and the bench it runs on."""

from __future__ import annotations

import contextlib
import importlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as lp
import pytest
from helpers.plans import any_plan
from helpers.random_programs import DrawsPrograms
from helpers.training import MemoryLogger, make_trainer, quiet, real_tensors

from conformance.modules import CaseData, CaseModule, data

TIMEOUT_S = 300.0
SPMD = "spmd"
"""In the place of a schedule: no pipeline, but one model on all ranks."""


@dataclass(frozen=True)
class Case:
    """One row of the table. Everything in it is made anew by every rank.

    Attributes:
        name: unique in its table; part of the test's name.
        trainer: arguments of the Trainer beside the silent defaults; two epochs unless said
            otherwise.
        module: makes the LightningModule (float64, so that rounding does not show).
        data: makes the loaders by Trainer argument, or ``{"datamodule": ...}``. The bench picks
            what each call takes.
        callbacks: makes further callbacks.
        script: what is done on the bench; by default one ``fit``.
        strategy: arguments of the strategy beside ``num_microbatches=4``.
        tolerance: of numbers, relative.
        only_whole: whether its training step needs the whole batch, or more than one call of the
            forward, so that it cannot run for every micro-batch.
    """

    name: str
    trainer: Mapping[str, Any] = field(default_factory=dict)
    module: Callable[[], lp.LightningModule] = CaseModule
    data: Callable[[], Mapping[str, Any]] = CaseData().arguments
    callbacks: Callable[[], list[lp.Callback]] = list
    script: Callable[[Bench], None] = lambda bench: bench.fit()
    strategy: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-9
    only_whole: bool = False


def calls(*names: str) -> Callable[[Bench], None]:
    """A script that makes these calls on one Trainer: ``calls("fit", "test")``."""

    def script(bench: Bench) -> None:
        for name in names:
            getattr(bench, name)()

    return script


def odd(name: str, module: Callable[[], lp.LightningModule], **options: Any) -> Case:
    """A case on batches of eight samples, three in training's last and six in validation's."""
    return Case(name, module=module, **{"data": data(num_samples=27), **options})


@dataclass
class Noted:
    """What a run of a case noted on one rank; see the package's docstring."""

    everywhere: dict[str, Any] = field(default_factory=dict)
    on_rank_0: dict[str, Any] = field(default_factory=dict)


class Bench:
    """Where a case runs: a module, a Trainer, and notes of every call on it.

    Args:
        case: which.
        num_ranks: ranks of the pipeline; None for one plain device.
        folder: of the Trainer; the same on all ranks.
        schedule: of the pipeline; :data:`SPMD` for drawn SPMD programs in its place.

    Attributes:
        module: the LightningModule.
        trainer: the Trainer; :meth:`new_trainer` makes another.
        data: the case's data.
        everywhere: notes that must be the same on every rank.
        on_rank_0: notes of rank 0.
        folder: of the Trainer.
    """

    def __init__(
        self, case: Case, num_ranks: int | None, folder: str, schedule: str | None = None
    ) -> None:
        self.case, self.num_ranks, self.folder = case, num_ranks, folder
        self.schedule = schedule
        self.everywhere: dict[str, Any] = {}
        self.on_rank_0: dict[str, Any] = {}
        self.module = case.module().double()
        self.data = dict(case.data())
        self.trainer = self.new_trainer()

    def new_trainer(self, **arguments: Any) -> lp.Trainer:
        """Another Trainer with the case's arguments, changed by these."""
        options: dict[str, Any] = {
            "default_root_dir": self.folder,
            "logger": MemoryLogger(),
            "max_epochs": 2,
            "callbacks": self.case.callbacks(),
        }
        strategy = None
        if self.num_ranks is not None:
            strategy = {"num_microbatches": 4, "timeout": TIMEOUT_S, "schedule": self.schedule}
            strategy |= dict(self.case.strategy)
            if self.schedule == SPMD:
                strategy = spmd_strategy(self.case, self.num_ranks)
        options |= dict(self.case.trainer) | arguments
        self.trainer = make_trainer(strategy, self.num_ranks or 1, **options)
        return self.trainer

    def fit(self, **arguments: Any) -> None:
        """Trains; notes weights, metrics and counters."""
        loaders = self._pick("train_dataloaders", "val_dataloaders")
        self.trainer.fit(self.module, **(loaders | arguments))
        self.note("fit", weights=real_tensors(self.module))

    def validate(self, **arguments: Any) -> None:
        """Validates; notes what it returns, too."""
        loaders = self._pick(dataloaders="val_dataloaders")
        returned = self.trainer.validate(self.module, **({"verbose": False} | loaders | arguments))
        self.note("validate", returned)

    def test(self, **arguments: Any) -> None:
        """Tests; notes what it returns, too."""
        loaders = self._pick(dataloaders="test_dataloaders")
        returned = self.trainer.test(self.module, **({"verbose": False} | loaders | arguments))
        self.note("test", returned)

    def predict(self, **arguments: Any) -> None:
        """Predicts; notes the predictions of rank 0."""
        loaders = self._pick(dataloaders="predict_dataloaders")
        returned = self.trainer.predict(self.module, **(loaders | arguments))
        self.note("predict", predictions=returned)

    def _pick(self, *names: str, **renamed: str) -> dict[str, Any]:
        if "datamodule" in self.data:
            return {"datamodule": self.data["datamodule"]}
        wanted = {name: name for name in names} | renamed
        return {key: self.data[name] for key, name in wanted.items() if name in self.data}

    def note(self, call: str, returned: Any = None, **on_rank_0: Any) -> None:
        """Notes where the Trainer stands, and what was given, of rank 0."""
        name = f"{len(self.everywhere)} {call}"
        trainer, fit = self.trainer, self.trainer.fit_loop
        self.everywhere[name] = {
            "returned": returned,
            "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "batches": fit.epoch_loop.total_batch_idx if call == "fit" else None,
            "should_stop": trainer.should_stop,
        }
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "record"):
                self.everywhere[name][type(callback).__name__] = dict(callback.record)
        rows = list(trainer.logger.rows) if isinstance(trainer.logger, MemoryLogger) else None
        self.on_rank_0[name] = on_rank_0 | {"logged": rows}


def spmd_strategy(case: Case, num_ranks: int) -> dict[str, Any]:
    """Arguments of a strategy that divides the case's module by a program of its own."""
    weights = [1 + (len(case.name) + rank) % 3 for rank in range(num_ranks)]
    found: dict[str, Any] = {
        "kind": "HAPStrategy",
        "planner": DrawsPrograms(len(case.name)),
        "shares": [weight / sum(weights) for weight in weights],
        "timeout": TIMEOUT_S,
    }
    if "plan" in case.strategy:  # by hand, so that rank 0 holds what its step reads
        found["planner"] = "data_parallel"
    return found | {key: value for key, value in case.strategy.items() if key == "module"}


def perform(case: Case, num_ranks: int | None, folder: str, schedule: str | None = None) -> Noted:
    """Runs a case as this process's rank, or on one plain device."""
    with quiet():
        bench = Bench(case, num_ranks, folder, schedule)
        case.script(bench)
    return Noted(bench.everywhere, bench.on_rank_0)


def cases_of(table: str) -> Sequence[Case]:
    """The cases of a table, ``"cases_loops"`` for example."""
    cases: Sequence[Case] = importlib.import_module(f"conformance.{table}").CASES
    return cases


@contextlib.contextmanager
def random_plans(seed: str) -> Iterator[None]:
    """The plans of trainings in its body are drawn, whatever planner is asked, and not kept."""
    from lightning_gpp.strategy.planning import planning

    choose = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "kept_answer", lambda _, request, __: any_plan(request, choose))
        patch.setattr(planning, "on_all_devices", lambda plan, _: plan)
        yield


def perform_on_rank(
    table: str,
    name: str,
    num_ranks: int,
    folder: str,
    *,
    draws_plans: bool = False,
    schedule: str | None = None,
) -> Noted:
    """Runs a case as this process's rank.

    Args:
        table: of the case.
        name: of the case.
        num_ranks: ranks of the pipeline.
        folder: of the Trainers.
        draws_plans: whether the plan is random instead of the default planner's, always the same.
        schedule: of the pipeline, or :data:`SPMD`.
    """
    (case,) = (case for case in cases_of(table) if case.name == name)
    with random_plans(name) if draws_plans else contextlib.nullcontext():
        return perform(case, num_ranks, folder, schedule)
