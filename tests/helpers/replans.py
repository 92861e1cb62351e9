"""A fit in which a rank is slow, and the plan is made anew, as a rank of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import lightning.pytorch as lp
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor

from helpers.models import DataSpec, ExportableModel
from helpers.modules import epoch_checkpoints
from helpers.training import make_trainer, quiet
from lightning_gpp.cost import Costs, Profile
from lightning_gpp.planner import Plan
from lightning_gpp.simulate import StepCosts
from lightning_gpp.simulate.refit import Refit
from lightning_gpp.simulate.slow_devices import SlowDevice, usual_kind
from lightning_gpp.strategy import build as building
from lightning_gpp.strategy import forms
from lightning_gpp.strategy.recording import replanning
from lightning_gpp.strategy.recording.replanning import Replanning
from lightning_gpp.strategy.recording.step_reports import Question

TIMES = 40.0
"""Times as long on a slow rank, by recorded steps."""


@dataclass
class Replanned:
    """What a rank has after the fit.

    Attributes:
        weights: of the module, which is whole.
        average: of the weights, where a callback keeps one.
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
    build: Callable[[], lp.LightningModule] = ExportableModel,
    folder: str | None = None,
    checkpoint: str | None = None,
    sanity: int = 0,
    forced: Plan | None = None,
    operator_s: float = 2e-4,
    since: int = 0,
    num_samples: int = 44,
    **strategy: Any,
) -> Replanned:
    """Trains two towers, on one device if there is one rank.

    Args:
        num_ranks: of the job.
        slow: ranks that are slow.
        num_epochs: of the training.
        worth_it: part of a step that a new plan has to gain.
        build: makes another module.
        folder: gets a checkpoint of every epoch, in the place of an average of the weights.
        checkpoint: to resume from.
        sanity: batches of validation before training.
        forced: every new plan is this one.
        operator_s: seconds of every operator's forward, by the profile and by recorded steps.
        since: step from which on the ranks are slow.
        num_samples: of an epoch.
        strategy: its options.
    """
    result = Replanned()
    average = EMAWeightAveraging(decay=0.9)
    keeping = [average] if folder is None else epoch_checkpoints(folder)
    options = {"max_epochs": num_epochs, "callbacks": [*keeping, _Keep(result)]}
    options |= {"num_sanity_val_steps": sanity, "enable_checkpointing": folder is not None}
    # A profile that another test has measured would be found in the cache.
    usual = {"num_microbatches": 4, "timeout": 100.0, "cache": False}
    chosen = usual | strategy if num_ranks > 1 else None
    module = build().double()
    data = DataSpec(num_samples=num_samples, num_inputs=2)  # the last batch of an epoch is smaller
    loaders = data.loader(), DataSpec(num_samples=8, num_inputs=2).loader()
    seconds = _known_seconds(operator_s, slow, since)
    with quiet(), seconds, _said(result, worth_it), _always(forced):
        trainer = make_trainer(chosen, num_ranks, **options)
        trainer.fit(module, *loaders, ckpt_path=checkpoint)
    result.weights = {name: value.clone() for name, value in module.state_dict().items()}
    if (found := average._average_model) is not None:
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
def _always(forced: Plan | None) -> Iterator[None]:
    """The leader finds this plan at every opportunity."""

    def found(_: Any, run: Any) -> Any:
        assert forced is not None
        planned = replace(run.forms[0].planned, plan=forced)
        return planned, "a new plan, predicted to take less"

    patched = nullcontext() if forced is None else mock.patch.object(Replanning, "_found", found)
    with patched:
        yield


@contextmanager
def _said(result: Replanned, worth_it: float) -> Iterator[None]:
    with (
        mock.patch.object(replanning, "show", result.said.append),
        mock.patch.object(forms, "show", result.said.append),
        mock.patch.object(replanning, "WORTH_IT", worth_it),
    ):
        yield


@contextmanager
def _known_seconds(operator_s: float, slow: Sequence[int], since: int) -> Iterator[None]:
    """Everything takes seconds that are known, on some ranks more: no plan depends on a clock."""
    profile, take = building.profile_costs, Replanning.take
    usual = Refit((), 0.0, (), StepCosts())

    def profiled(*args: Any) -> Costs:
        return Costs(tuple(_with_seconds(one, operator_s) for one in profile(*args).profiles))

    def taken(self: Any, run: Any, step: int, timeline: Any, why_not: str) -> None:
        if timeline is not None:
            with suppress(ValueError):  # one that cannot be compared stays
                question = Question.of(run.built, timeline)
                kind, _ = usual_kind(question.request.cluster.devices[0].kind)
                ranks = slow if step >= since else ()
                costs = replace(usual, slow=tuple(SlowDevice(r, kind, TIMES) for r in ranks))
                timeline = replace(question.predicted(costs), source="measured", step=step)
        take(self, run, step, timeline, why_not)

    with (
        mock.patch.object(building, "profile_costs", profiled),
        mock.patch.object(Replanning, "take", taken),
        mock.patch.object(replanning, "EVERY", 10),
    ):
        yield


def _with_seconds(profile: Profile, operator_s: float) -> Profile:
    seconds = {"forward_s": operator_s, "backward_s": 2 * operator_s}
    known = {name: replace(one, **seconds) for name, one in profile.operators.items()}
    return replace(profile, operators=known)
