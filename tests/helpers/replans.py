"""A fit in which a rank is slow, and the plan is made anew, as a rank of a pipeline."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import lightning.pytorch as lp
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor

from helpers.models import DataSpec, ExportableModel
from helpers.training import make_trainer, quiet
from lightning_gpp.strategy import build
from lightning_gpp.strategy.recording import replanning

PARAMETER_S = 4e-3
"""Seconds that a slow rank sleeps for every parameter of a forward."""


@dataclass
class Replanned:
    """What a rank has after the fit.

    Attributes:
        weights: of the module, which is whole.
        average: of the weights, which a callback keeps.
        optimizer: state dict, on rank 0.
        held: parameters that this rank held at the end of every epoch.
        said: lines about plans, on rank 0.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


def fit_with_replans(
    num_ranks: int,
    slow: Sequence[int] = (),
    num_epochs: int = 4,
    worth_it: float = replanning.WORTH_IT,
    **strategy: Any,
) -> Replanned:
    """Trains two towers, on one device if there is one rank."""
    result = Replanned()
    average = EMAWeightAveraging(decay=0.9)
    callbacks = [average, _Keep(result)]
    options = {"max_epochs": num_epochs, "callbacks": callbacks, "num_sanity_val_steps": 0}
    chosen = {"num_microbatches": 4, "timeout": 100.0, **strategy} if num_ranks > 1 else None
    module = ExportableModel().double()
    data = DataSpec(num_samples=44, num_inputs=2)  # the last batch of an epoch is smaller
    with quiet(), _slow_ranks(slow), _said(result, worth_it):
        trainer = make_trainer(chosen, num_ranks, **options)
        trainer.fit(module, data.loader(), DataSpec(num_samples=8, num_inputs=2).loader())
    result.weights = {name: value.clone() for name, value in module.state_dict().items()}
    found = average._average_model
    assert found is not None
    result.average = {name: value.clone() for name, value in found.state_dict().items()}
    result.optimizer = trainer.optimizers[0].state_dict()["state"]
    return result


class _Keep(lp.Callback):
    def __init__(self, result: Replanned) -> None:
        self.result = result

    def on_train_epoch_end(self, trainer: lp.Trainer, *_: Any) -> None:
        session = getattr(trainer.strategy, "session", None)
        if session is not None:
            self.result.held.append(len(session.run.partition.held_parameters()))


@contextmanager
def _said(result: Replanned, worth_it: float) -> Iterator[None]:
    with (
        mock.patch.object(replanning, "show", result.said.append),
        mock.patch.object(replanning, "WORTH_IT", worth_it),
    ):
        yield


@contextmanager
def _slow_ranks(slow: Sequence[int]) -> Iterator[None]:
    """Stages of these ranks sleep in their forwards, the longer the more parameters they have."""
    original = build._called

    def called(stage: Any) -> Any:
        function, count = original(stage), len(stage.parameter_names)

        def sleeping(*args: Any) -> Any:
            time.sleep(PARAMETER_S * max(1, count))
            return function(*args)

        return sleeping if dist.get_rank() in slow else function

    with mock.patch.object(build, "_called", called):
        yield
