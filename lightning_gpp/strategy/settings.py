"""The user's options, and checks of what does not go together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from torch.optim import LBFGS

from lightning_gpp.capture import BlockGraph
from lightning_gpp.common.checks import check_whole, is_number
from lightning_gpp.cost import Costs
from lightning_gpp.gnn import Techniques
from lightning_gpp.planner import GRAPHPIPE, PLANNERS, Plan, Stage
from lightning_gpp.planner.base import ONE_VERSION, HeldVersions
from lightning_gpp.schedule import ONE_F_ONE_B_ASYNC
from lightning_gpp.simulate.refit import Refit, load_costs_or_refit
from lightning_gpp.strategy.devices.devices_at_hand import ClusterLike, check_cluster
from lightning_gpp.strategy.lightning_private import is_overridden
from lightning_gpp.weights.policies import PIPEOPTIM, POLICIES, BackwardWeights, Policy, find_policy

Report = Literal["short", "full"]

PlanLike = Plan | str | Path | Sequence[Any] | dict[str, Any]

CacheLike = bool | str | Path
"""Whether to keep profiles and refits, or the folder to keep them in."""

CostsLike = Costs | Refit | str | Path
"""Costs, a refit, or a file that holds either."""


def resolve_costs(given: CostsLike | None) -> Costs | Refit | None:
    """Reads the costs that the user gave.

    Raises:
        ValueError: the file holds neither costs nor a refit.
        FileNotFoundError: there is no such file.
    """
    if given is None or isinstance(given, (Costs, Refit)):
        return given
    return load_costs_or_refit(given)


@dataclass(frozen=True, slots=True)
class FullGraph:
    """Options of training on one graph in chunks.

    Attributes:
        chunks: number of chunks; None for :data:`CHUNKS_PER_RANK` per rank.
        techniques: how histories are used.
        begins_exact: whether histories begin with an exact pass, and not with zeros.
        seed: of the partition and of the order of chunks; None for the Trainer's.
        ways: parts of every chunk, which devices of their own run side by side.
    """

    chunks: int | None = None
    techniques: Techniques = field(default_factory=Techniques)
    begins_exact: bool = False
    seed: int | None = None
    ways: int = 1

    def num_chunks(self, num_ranks: int) -> int:
        """Number of chunks."""
        return self.chunks or max(1, CHUNKS_PER_RANK * num_ranks // self.ways)


CHUNKS_PER_RANK = 4
"""Chunks per stage in GNNPipe's experiments (arXiv 2308.10087)."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The user's options; see :class:`~lightning_gpp.strategy.GraphPipeStrategy`.

    ``per_update`` is the Trainer's: batches whose gradients are accumulated, the fewest of the run.
    ``is_emulated`` and ``time_scale`` (real seconds that an emulated second takes; None to choose
    it) are the accelerator's.
    """

    num_microbatches: int | None = None
    schedule: str | None = None
    planner: str = GRAPHPIPE
    plan: PlanLike | None = None
    module: str | None = None
    blocks: BlockGraph | None = None
    leaf_modules: tuple[type | str, ...] = ()
    timeout_s: float = 1800.0
    cluster: ClusterLike | None = None
    cache: CacheLike = True
    use_all_devices: bool = True
    is_emulated: bool = False
    time_scale: float | None = None
    costs: Costs | Refit | None = None
    weights: str | None = None
    full_graph: FullGraph | None = None
    report: Report = "short"
    compile: Mapping[str, Any] | None = None
    per_update: int = 1
    replan_every_n_epochs: int | None = None

    @property
    def is_asynchronous(self) -> bool:
        """Whether several mini-batches are in flight: the pipeline does not drain between them."""
        return self.schedule == ONE_F_ONE_B_ASYNC.name

    @property
    def prefix(self) -> str:
        """Prefix of the pipelined module's names in the LightningModule."""
        return f"{self.module}." if self.module else ""

    @property
    def policy(self) -> Policy:
        """The policy of weights for a pipeline that does not drain."""
        return POLICIES[self.weights or PIPEOPTIM.name]

    @property
    def held_versions(self) -> HeldVersions:
        """Copies of their parameters that stages hold."""
        if not self.is_asynchronous:
            return ONE_VERSION
        return HeldVersions(*self.policy.held_versions(self.per_update))


# What the strategy does not take, said before anything runs ---------------------------------------


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
            f"compile={given!r} does not go with schedule={schedule!r}: its stages use new weight "
            "tensors in every step, so each step would compile again; use another schedule"
        )
    options = {} if given is True else dict(given)
    if "fullgraph" in options:
        raise ValueError("compile: every stage is one graph; leave 'fullgraph' out")
    return options


def check_settings(settings: Settings) -> None:
    """Raises ValueError where an option is unknown, makes no sense, or does not go with another."""
    schedule, weights = settings.schedule, settings.weights
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
            f"schedule={schedule!r} keeps whole mini-batches in flight and needs "
            f"num_microbatches=1, got {num_microbatches}"
        )
    if (epochs := settings.replan_every_n_epochs) is not None:
        check_whole("replan_every_n_epochs", epochs)
        if settings.plan is not None or settings.is_asynchronous:
            what = "plan=" if settings.plan is not None else f"schedule={schedule!r}"
            raise ValueError(
                f"replan_every_n_epochs={epochs} does not go with {what}, whose plan stays what "
                "it is; leave one of them out"
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
    if num_pipelines > 1 and settings.is_emulated:
        raise NotImplementedError(
            "pipelines side by side are not emulated; emulate one of them "
            f"(devices={num_ranks // num_pipelines}, pipelines=1)"
        )


def check_replanning(module: pl.LightningModule, settings: Settings) -> None:
    """Raises NotImplementedError, with the remedy, where a new plan cannot come between epochs."""
    why = None
    if settings.is_emulated:
        why = "emulated devices take what is predicted, so recorded steps tell nothing new"
    elif not module.automatic_optimization:
        why = "manual optimization may keep gradients from one epoch to the next, which do not move"
    if settings.replan_every_n_epochs is not None and why:
        raise NotImplementedError(f"replan_every_n_epochs: {why}; leave it out")


Refused = Mapping[type[pl.Callback], str]
"""Kind of callbacks -> what is wrong with them, and the remedy."""

DIVIDED: Refused = {
    ModelPruning: "renames parameters, by whose names stages find them; on one device use "
    "schedule='gpipe' and one pipeline on a real device, which leave the module as it is",
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


def refuse_callbacks(trainer: pl.Trainer, refused: Refused) -> None:
    """Raises NotImplementedError, with the remedy, for callbacks that cannot work there."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, why in refused.items():
            if isinstance(callback, kind):
                raise NotImplementedError(f"{type(callback).__name__} {why}")


_OR = "or use schedule='gpipe'"


def refuse_for_async(trainer: pl.Trainer, settings: Settings, ahead: int = 0) -> None:
    """Raises NotImplementedError, with the remedy, for what cannot go on without draining.

    Args:
        trainer: about to fit or to begin an epoch, with its module and optimizers.
        settings: what the user asked for.
        ahead: batches that the pipeline is ahead at most, once that is known.
    """
    for why in _reasons(trainer, settings, ahead):
        raise NotImplementedError(f"schedule='1f1b-async' {why}, {_OR}")


def _reasons(trainer: pl.Trainer, settings: Settings, ahead: int) -> Iterator[str]:
    module = trainer.lightning_module
    if not module.automatic_optimization:
        yield (
            "steps the optimizer of a batch while others are in flight, which manual optimization "
            "decides by itself: use automatic optimization"
        )
    if why := settings.policy.why_not(trainer.accumulate_grad_batches, ahead):
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
        if stage.num_replicas > 1 or stage.recompute:
            what = f"{stage.num_replicas} replicas" if stage.num_replicas > 1 else "recomputation"
            raise NotImplementedError(
                "schedule='1f1b-async' updates every stage by itself, with weights of its own for "
                f"every forward, but stage {stage.id} has {what}: give every stage one device "
                f"and no recomputation, {_OR}"
            )


def fewest_per_update(trainer: pl.Trainer) -> int:
    """The fewest batches that an update of a run takes; callbacks may change it between epochs."""
    counts = set()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            counts |= set(callback.scheduling.values())
    return min(counts or {trainer.accumulate_grad_batches})
