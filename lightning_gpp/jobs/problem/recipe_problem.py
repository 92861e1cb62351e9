"""The problem of a recipe: its module captured and profiled where its training would begin."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from omegaconf import DictConfig
from torch import nn

from lightning_gpp.capture import CapturedModel, capture, profile_costs
from lightning_gpp.cluster import Cluster
from lightning_gpp.cluster.this_machine import CPU, num_cores
from lightning_gpp.common.progress import doing
from lightning_gpp.cost import Costs
from lightning_gpp.jobs.files import save_graph
from lightning_gpp.jobs.options import as_flag, as_text
from lightning_gpp.jobs.problem.first_call import Step, until_first_call
from lightning_gpp.jobs.problem.problem import (
    PlanningProblem,
    refitted,
    schedule_of,
    strategy_option,
)
from lightning_gpp.planner import plan_request
from lightning_gpp.planner.plan.by_rank import in_plan_order
from lightning_gpp.simulate.refit.refit import Refit
from lightning_gpp.strategy.cutting.microbatches import (
    batch_size,
    cut_batch,
    default_microbatches,
    microbatch_sizes,
)
from lightning_gpp.strategy.planning.costs_given import resolve_costs
from lightning_gpp.strategy.planning.full_graph import GraphCall
from lightning_gpp.strategy.planning.plan_cache import CacheLike, PlanCache, refit_key
from lightning_gpp.strategy.planning.planning import most_replicas
from lightning_gpp.strategy.report import show


class Look:
    """What the first step of a training shows."""

    def __init__(self) -> None:
        self.minibatch_size = 0
        self.call: GraphCall | None = None
        self.captured: CapturedModel | None = None
        self.costs: Costs | None = None
        self.notes: tuple[str, ...] = ()


def recipe_problem(config: DictConfig, cluster: Cluster, folder: Path) -> PlanningProblem:
    """Captures and profiles a recipe's module on this machine.

    Kinds of devices that are not here get estimates by the roofline model. The graph and the costs
    are written down: with them the module can be planned for other clusters without torch.

    Raises:
        ValueError: the strategy is none that pipelines, or the numbers make no sense.
        CaptureError: the module cannot be captured.
    """
    schedule = schedule_of(config)
    asked = config.num_microbatches
    if asked is None:
        asked = strategy_option(config, "num_microbatches")
    with threads_of_one_of(cluster):
        look = look_at(config, asked or default_microbatches(cluster.num_devices))
    assert look.captured is not None and look.costs is not None
    save_graph(look.captured.graph, look.costs, folder)
    request = plan_request(
        look.captured.graph,
        in_plan_order(cluster),
        minibatch_size=(
            look.minibatch_size if config.minibatch_size is None else config.minibatch_size
        ),
        costs=look.costs,
        num_microbatches=asked,
        may_recompute=as_flag("recompute", config.recompute),
        max_replicas=most_replicas(asked),
    )
    sizes = sorted(profile.microbatch_size for profile in look.costs.profiles)
    source = (
        f"{config.recipe.module._target_}, captured and measured on "
        f"{', '.join(look.costs.by_kind)} (micro-batches of {', '.join(f'{s:g}' for s in sizes)})"
    )
    fills = strategy_option(config, "use_all_devices") is not False
    problem = PlanningProblem(
        module_name(config), source, request, schedule, look.notes, uses_all_devices=fills
    )
    given = resolve_costs(as_text("costs", config.costs) or strategy_option(config, "costs"))
    if given is None:
        return problem
    if isinstance(given, Costs):
        return replace(problem, request=replace(request, costs=given))
    if isinstance(given, Refit):
        return refitted(problem, given)
    known = PlanCache(_cache(config)).refit(refit_key(look.captured, torch.device(CPU)))
    if known is None:
        raise ValueError(
            "costs=refit: no refit of this model on this machine is known; train it with "
            "TimelineCallback (the job train has it), or give a refit.json"
        )
    return refitted(problem, known)


def _cache(config: DictConfig) -> CacheLike:
    """Where profiles, plans and refits are kept."""
    cache: CacheLike | None = strategy_option(config, "cache")
    return True if cache is None else cache


@contextlib.contextmanager
def threads_of_one_of(cluster: Cluster) -> Iterator[None]:
    """Gives torch the cores that one of the cluster's processes would have on this machine."""
    before = torch.get_num_threads()
    if CPU in cluster.kinds:
        torch.set_num_threads(max(1, num_cores() // cluster.num_devices))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def module_name(config: DictConfig) -> str:
    """The class of the module."""
    parts: list[str] = config.recipe.module._target_.split(".")
    return next((part for part in parts if part[:1].isupper()), parts[-1])


def look_at(config: DictConfig, num_microbatches: int | None) -> Look:
    """Trains on one device up to the first call of the pipelined forward.

    Args:
        config: of the run.
        num_microbatches: of which the first one is looked at, and measured; None for a batch that
            is one graph, of which nothing is measured.
    """
    look = Look()
    cache = None if num_microbatches is None else _cache(config)
    leaf_modules = tuple(strategy_option(config, "leaf_modules") or ())

    def watch(target: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if cache is None:
            look.call = GraphCall.of(target, args, kwargs)
            args, kwargs = look.call.args, look.call.kwargs
        with doing("Capturing the model", show):
            look.captured = capture(target, args, kwargs, leaf_modules=leaf_modules)
        if cache is not None:
            look.costs, look.notes = _costs(look.captured, args, kwargs, cache)

    def step(module: LightningModule) -> Step:
        if num_microbatches is None:
            return module.training_step
        return _small_step(module, look, num_microbatches)

    until_first_call(config, watch, step)
    return look


def _small_step(module: LightningModule, look: Look, num_microbatches: int) -> Step:
    """The module's step on the first micro-batch of a batch."""
    whole_step = module.training_step

    def step(batch: Any, *args: Any, **kwargs: Any) -> Any:
        look.minibatch_size = batch_size(batch)
        sizes = microbatch_sizes(look.minibatch_size, num_microbatches)
        return whole_step(cut_batch(batch, sizes)[0], *args, **kwargs)

    return step


def _costs(
    captured: CapturedModel, args: tuple[Any, ...], kwargs: dict[str, Any], cache: CacheLike
) -> tuple[Costs, tuple[str, ...]]:
    """The costs, measured now or found in the cache of training, and a note where they are."""
    tensors = captured.inputs(args, kwargs).values()
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    with doing("Measuring the model", show):
        return PlanCache(cache).costs(
            captured, device, lambda: profile_costs(captured, args, kwargs)
        )
