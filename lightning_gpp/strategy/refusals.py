"""What the strategy does not take, said before anything runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, get_args

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Checkpoint,
    EarlyStopping,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)

from lightning_gpp.common.checks import check_whole, is_number
from lightning_gpp.planner import PLANNERS
from lightning_gpp.schedule import ONE_F_ONE_B_ASYNC, SCHEDULES
from lightning_gpp.strategy.devices.devices_at_hand import check_cluster
from lightning_gpp.strategy.settings import Report, Settings
from lightning_gpp.weights.policies import find_policy


def check_name(what: str, name: str, known: Collection[str]) -> None:
    """Raises ValueError, naming the known ones, when there is none of this name."""
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; known {what}s: {', '.join(known)}")


def compile_options(given: bool | Mapping[str, Any], schedule: str | None) -> dict[str, Any] | None:
    """Options of ``torch.compile`` for stages; None where they are not compiled.

    Raises:
        ValueError: an option that stages decide, or a schedule that exchanges their weights.
    """
    if given is False:
        return None
    if schedule == ONE_F_ONE_B_ASYNC.name:
        raise ValueError(
            f"compile={given!r}: the stages of schedule={schedule!r} run with other tensors in the "
            "place of their weights every time, which would be compiled anew; use another schedule"
        )
    options = {} if given is True else dict(given)
    if "fullgraph" in options:
        raise ValueError("compile: every stage is one graph; leave 'fullgraph' out")
    return options


def check_settings(settings: Settings) -> None:
    """Raises ValueError where an option is unknown, makes no sense, or does not go with another."""
    schedule, weights = settings.schedule, settings.weights
    if schedule is not None:
        check_name("schedule", schedule, [*SCHEDULES, ONE_F_ONE_B_ASYNC.name])
    check_name("planner", settings.planner, PLANNERS)
    check_name("report", settings.report, get_args(Report))
    if weights is not None:
        find_policy(weights)
        if not settings.is_asynchronous:
            raise ValueError(
                f"weights={weights!r} is for schedule={ONE_F_ONE_B_ASYNC.name!r}, "
                f"got schedule={schedule!r}"
            )
    num_microbatches = settings.num_microbatches
    if num_microbatches is not None:
        check_whole("num_microbatches", num_microbatches)
    if settings.is_asynchronous and num_microbatches not in (None, 1):
        raise ValueError(
            f"schedule={schedule!r} has whole mini-batches in flight, so num_microbatches is 1, "
            f"got {num_microbatches}"
        )
    if not is_number(settings.timeout_s) or settings.timeout_s <= 0:
        raise ValueError(f"timeout is in seconds and must be positive, got {settings.timeout_s!r}")
    if not isinstance(settings.use_all_devices, bool):
        raise ValueError(f"use_all_devices must be True or False, got {settings.use_all_devices!r}")
    check_cluster(settings.cluster)


def check_pipelines(settings: Settings, num_pipelines: int, num_ranks: int) -> None:
    """Raises ValueError or NotImplementedError where these ranks cannot be several pipelines."""
    if num_ranks % num_pipelines:
        raise ValueError(
            f"{num_ranks} devices cannot be {num_pipelines} pipelines of equal size; use a number "
            "of devices that pipelines divides"
        )
    if num_pipelines > 1 and settings.emulated is not None:
        raise NotImplementedError(
            "pipelines side by side are not emulated; emulate one of them "
            f"(devices={num_ranks // num_pipelines}, pipelines=1)"
        )
    if num_pipelines > 1 and settings.full_graph is not None:
        raise NotImplementedError(
            "a full graph is one batch, of which pipelines side by side have no parts; use "
            "ways=N of GNNPipeStrategy instead of pipelines"
        )


Refused = Mapping[type[pl.Callback], str]
"""Kind of callbacks -> what is wrong with them, and the remedy."""

ON_ONE_RANK: Refused = {
    ModelPruning: "renames parameters, by whose names the strategy finds them; on one device use "
    'Lightning\'s own strategy (strategy="auto")',
}
ON_STAGES: Refused = {
    ModelPruning: "replaces parameters of the whole model on every rank, but a rank holds only "
    "those of its stages; prune the trained module on one device after the fit (torch.nn.utils."
    "prune)",
    BatchSizeFinder: "tries sizes until memory runs out, which would end one rank and with it the "
    "run; choose the batch size by hand and find out with a short fit (max_steps=3)",
}
SHARDED: Refused = dict.fromkeys(
    (WeightAveraging, StochasticWeightAveraging),
    "keeps other weights beside those of the module in a checkpoint, which "
    'state_dict_type="sharded" does not write; use state_dict_type="full"',
)
SHAPE_ONLY: Refused = {
    Checkpoint: 'has no weights to save with tensors="shape_only"; use Trainer('
    "enable_checkpointing=False)",
    EarlyStopping: 'has no values to stop by with tensors="shape_only"; leave it out',
}


def refuse_callbacks(trainer: pl.Trainer, refused: Refused) -> None:
    """Raises NotImplementedError, with the remedy, for callbacks that cannot work there."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, why in refused.items():
            if isinstance(callback, kind):
                raise NotImplementedError(f"{type(callback).__name__} {why}")
