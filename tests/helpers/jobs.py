"""What the ranks of a test do where training once (:func:`helpers.training.train`) is not it."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor
from torch.utils.data import DataLoader

from helpers import modules
from helpers.models import DataSpec, ExportableModel
from helpers.records import heard
from helpers.training import (
    Recording,
    Result,
    Training,
    make_trainer,
    quiet,
    train,
)
from lightning_gpp.graph import StageEdge, StageGraph
from lightning_gpp.planner.plan.plan import Plan

Strategy = dict[str, Any] | None


def fit_mixed(where: str, num_steps: int, num_ranks: int = 3) -> list[float]:
    """Trains a module whose loss checks each pair, on samples mixed by random numbers.

    Args:
        where: the mixing happens in the data set's ``"getitem"``, there but in a ``"worker"``
            process of the loader, or in the ``"collate"`` function.
        num_steps: of the training; an epoch, which starts the worker, has four.
        num_ranks: ranks of the job.
    """
    if where == "collate":
        data: Any = DataSpec(num_inputs=2).loader().dataset
        loader: DataLoader[Any] = DataLoader(data, 8, collate_fn=modules.mixing_collate)
    else:
        # Spawned: the pool's processes have run other jobs, and forking such a process is not safe.
        options = {"num_workers": 1, "multiprocessing_context": "spawn"}
        loader = DataLoader(modules.MixingData(), 8, **(options if where == "worker" else {}))
    result = Result()
    with quiet():
        trainer = make_trainer(
            {"num_microbatches": 4, "timeout": 100.0},
            num_ranks,
            max_steps=num_steps,
            callbacks=[Recording(result)],
        )
        trainer.fit(modules.EchoModel().double(), loader)
    return result.losses


def evaluate_another(strategy: Strategy, num_ranks: int = 1) -> dict[str, Any]:
    """Fits a module; then its Trainer validates, predicts and tests others, and the first again.

    Returns:
        What was measured, by call; the weights of the last checkpoint.
    """
    training = Training(ExportableModel, DataSpec(num_inputs=2))
    loader = training.validation_data().loader()
    module, others = training.module(), [training.module(), _Predicting().double()]
    with torch.no_grad():
        for factor, other in enumerate(others, start=2):
            for parameter in other.parameters():
                parameter.mul_(factor)
    found: dict[str, Any] = {}
    with quiet(), tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(strategy, num_ranks, max_steps=6, default_root_dir=folder)
        trainer.fit(module, training.data.loader(), loader)
        for index, each in enumerate([*others, module, others[0]]):
            found[f"{index}"] = trainer.validate(each, loader, verbose=False)
        found["predicted"] = trainer.predict(others[1], loader)
        trainer.fit(others[0], training.data.loader(), loader)
        found["last"] = trainer.validate(module, loader, verbose=False)
    if trainer.global_rank:
        del found["predicted"]
    return found


def save_after_fit(path: str, strategy: Strategy, num_ranks: int = 1) -> dict[str, Tensor]:
    """Writes a checkpoint by ``trainer.save_checkpoint`` when the fit is over."""
    training = Training(ExportableModel, DataSpec(num_inputs=2), num_steps=6, save_as=path)
    return train(training, strategy, num_ranks).weights


def plan_of_fit(strategy: dict[str, Any], num_ranks: int) -> tuple[Plan, tuple[StageEdge, ...]]:
    """The plan and the edges of the stage graph that the strategy shows after a fit."""
    training, stages = Training(ExportableModel, DataSpec(num_inputs=2)), list[StageGraph]()

    def keep(trainer: Any, *_: Any) -> None:
        stages.append(trainer.strategy.session.run.built.placed.stages)

    callback = LambdaCallback(on_train_batch_end=keep)
    with quiet(), tempfile.TemporaryDirectory() as folder:
        arguments = {"default_root_dir": folder, "callbacks": [callback]}
        trainer = make_trainer(strategy, num_ranks, max_steps=2, **arguments)
        trainer.fit(training.module(), training.data.loader())
    chosen: Any = trainer.strategy
    has_loss_stage = chosen.plan.stages[-1].num_replicas > 1
    assert stages[0].num_stages == chosen.plan.num_stages + has_loss_stage
    return chosen.plan, stages[0].edges


def lines_of_fit(training: Training, strategy: dict[str, Any], num_ranks: int) -> list[str]:
    """This package's warnings during a fit, and what it says of how batches are cut."""
    from lightning_gpp.strategy import pipelined_run
    from lightning_gpp.strategy.step import cut_checks

    shown: list[str] = []
    with warnings.catch_warnings(record=True) as seen, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        for room in (cut_checks, pipelined_run):
            patch.setattr(room, "show", shown.append)
        trainer = make_trainer(
            {"timeout": 100.0} | strategy, num_ranks, max_steps=training.num_steps
        )
        trainer.fit(training.module(), training.data.loader())
    return shown + [str(w.message) for w in seen if "lightning_gpp" in w.filename]


class _Predicting(ExportableModel):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.call_forward(batch[0])


def actions_of_fit(strategy: dict[str, Any], num_ranks: int) -> list[str]:
    """The actions that this rank runs for one mini-batch of a fit."""
    seen: list[str] = []
    with quiet():
        trainer = make_trainer(strategy, num_ranks, max_steps=1)
        with heard(lambda record: seen.append(str(record.action))):
            trainer.fit(ExportableModel().double(), DataSpec(num_inputs=2).loader())
    return seen
