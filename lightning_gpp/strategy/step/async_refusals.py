"""What an asynchronous pipeline does not take, said before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import LBFGS

from lightning_gpp.graph import StageGraph
from lightning_gpp.planner import Stage
from lightning_gpp.schedule import most_ahead
from lightning_gpp.strategy.settings import Settings
from lightning_gpp.weights.policies import BackwardWeights

_OR = "or use schedule='gpipe'"


def refuse_for_async(trainer: pl.Trainer, settings: Settings) -> None:
    """Raises NotImplementedError, with the remedy, for what cannot go on without draining.

    Args:
        trainer: about to fit or to begin an epoch, with its module and optimizers.
        settings: what the user asked for.
    """
    for why in _reasons(trainer, settings):
        raise NotImplementedError(f"schedule='1f1b-async' {why}, {_OR}")


def _reasons(trainer: pl.Trainer, settings: Settings) -> Iterator[str]:
    module = trainer.lightning_module
    if not module.automatic_optimization:
        yield (
            "steps the optimizer of a batch while others are in flight, which manual optimization "
            "decides by itself: use automatic optimization"
        )
    per_update = trainer.accumulate_grad_batches
    if why := settings.policy.why_not(per_update, most_ahead=0):
        yield f"with {why}"
    if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
        yield "cannot evaluate a loss several times per step, as LBFGS does: use another optimizer"
    if isinstance(trainer.precision_plugin, MixedPrecision):
        if trainer.precision_plugin.scaler is not None:
            yield (
                "updates every stage by itself, but precision='16-mixed' skips the step of all of "
                "them where the gradients of one are not finite: use precision='bf16-mixed'"
            )
        elif settings.policy.backward is not BackwardWeights.OF_FORWARD:
            yield (
                f"with weights={settings.policy.name!r} has backwards that meet other weights than "
                "their forward, of which mixed precision keeps casts: use weights='stash', or "
                "precision='bf16-true'"
            )
    if is_overridden("configure_gradient_clipping", module):
        yield "clips gradients stage by stage: do not override configure_gradient_clipping"


def refuse_async_plan(stages: Iterable[Stage]) -> None:
    """Raises NotImplementedError, with the remedy, for stages that cannot go on without draining.

    Args:
        stages: of a plan.
    """
    for stage in stages:
        if stage.num_replicas > 1:
            raise NotImplementedError(
                f"schedule='1f1b-async' updates every stage by itself, but stage {stage.id} has "
                f"{stage.num_replicas} replicas, which would wait for each other's gradients "
                f"before every update: give it one device, {_OR}"
            )
        if stage.recompute:
            raise NotImplementedError(
                f"schedule='1f1b-async' has no recomputation, but stage {stage.id} would run its "
                "forward again, with other weights than those that others have the outputs of: "
                f"use a plan without it, {_OR}"
            )


def fewest_per_update(trainer: pl.Trainer) -> int:
    """The fewest batches that an update of a run takes; callbacks may change it between epochs."""
    counts = set()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            counts |= set(callback.scheduling.values())
    return min(counts or {trainer.accumulate_grad_batches})


def refuse_short_updates(trainer: pl.Trainer, settings: Settings, stages: StageGraph) -> None:
    """Raises ValueError where 2BW would need more than two versions of the weights.

    Args:
        trainer: says of how many batches an update is.
        settings: what the user asked for.
        stages: the deepest of them says how many batches the pipeline is ahead.
    """
    if why := settings.policy.why_not(trainer.accumulate_grad_batches, most_ahead(stages)):
        raise ValueError(why)
