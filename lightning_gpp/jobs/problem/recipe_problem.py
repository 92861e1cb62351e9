"""Captures and measures a recipe's module where its training would begin."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from hydra.utils import instantiate
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf
from torch import nn

from lightning_gpp.capture import CapturedModel, capture, profile_costs
from lightning_gpp.cluster import Cluster
from lightning_gpp.cluster.this_machine import CPU, num_cores
from lightning_gpp.common.instance_attribute import instance_attribute, taken_away
from lightning_gpp.common.progress import doing
from lightning_gpp.cost import Costs, costs_to_json
from lightning_gpp.graph import graph_to_json
from lightning_gpp.jobs.console import QuietConsole
from lightning_gpp.jobs.options import as_flag, as_text
from lightning_gpp.jobs.problem.problem import (
    PlanningProblem,
    schedule_of,
    strategy_option,
)
from lightning_gpp.jobs.train import build_recipe
from lightning_gpp.planner import plan_request
from lightning_gpp.planner.plan.by_rank import in_plan_order
from lightning_gpp.planner.plan_to_run import PlanQuestion
from lightning_gpp.strategy.cutting.microbatches import (
    batch_size,
    cut_batch,
    default_microbatches,
    microbatch_sizes,
)
from lightning_gpp.strategy.pipeline import pipelined_module
from lightning_gpp.strategy.planning.profile_cache import profiled
from lightning_gpp.strategy.report import show
from lightning_gpp.strategy.settings import resolve_costs

Seen = TypeVar("Seen")


class SeenError(Exception):
    """Ends a training once it has shown the model."""


class Look(NamedTuple):
    """What the first training step shows: the model, and the costs of a micro-batch."""

    captured: CapturedModel
    minibatch_size: int
    costs: Costs
    notes: tuple[str, ...] = ()


def recipe_problem(config: DictConfig, cluster: Cluster, folder: Path) -> PlanningProblem:
    """Captures and profiles a recipe's module on this machine.

    Kinds of devices that are not here get estimates by the roofline model. The graph and the costs
    are written down: with them the module can be planned for other clusters without torch.

    Raises:
        ValueError: the strategy is none that pipelines, or the numbers make no sense.
        CaptureError: the module cannot be captured.
    """
    schedule, asked = schedule_of(config), config.num_microbatches
    if asked is None:
        asked = strategy_option(config, "num_microbatches")
    with threads_of_one_of(cluster):
        look = look_at(config, asked or default_microbatches(cluster.num_devices))
    captured, costs = look.captured, look.costs
    # `job=plan graph=... costs=...` reads them.
    (folder / "graph.json").write_text(graph_to_json(captured.graph), encoding="utf-8")
    (folder / "costs.json").write_text(costs_to_json(costs), encoding="utf-8")
    size = look.minibatch_size if config.minibatch_size is None else config.minibatch_size
    request = plan_request(
        captured.graph,
        in_plan_order(cluster),
        minibatch_size=size,
        costs=costs,
        num_microbatches=asked,
        may_recompute=as_flag("recompute", config.recompute),
        max_replicas=1 if asked == 1 else None,
    )
    sizes = sorted(profile.microbatch_size for profile in costs.profiles)
    source = (
        f"{config.recipe.module._target_}, captured and measured on "
        f"{', '.join(costs.by_kind)} (micro-batches of {', '.join(f'{s:g}' for s in sizes)})"
    )
    fills = strategy_option(config, "use_all_devices") is not False
    question = PlanQuestion(request, schedule=schedule, uses_all_devices=fills)
    parts: list[str] = config.recipe.module._target_.split(".")
    name = next((part for part in parts if part[:1].isupper()), parts[-1])  # the module's class
    problem = PlanningProblem(name, source, question, look.notes)
    given = resolve_costs(as_text("costs", config.costs) or strategy_option(config, "costs"))
    if isinstance(given, Costs):
        return problem.with_request(replace(request, costs=given))
    return problem if given is None else problem.refitted(given)


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


def look_at(config: DictConfig, num_microbatches: int) -> Look:
    """Trains on one device up to the first call of the pipelined forward.

    Args:
        config: of the run.
        num_microbatches: of which the first one is looked at, and measured.
    """
    leaf_modules = tuple(strategy_option(config, "leaf_modules") or ())
    size = 0

    def first_microbatch(batch: Any) -> Any:
        nonlocal size
        size = batch_size(batch)
        return cut_batch(batch, microbatch_sizes(size, num_microbatches))[0]

    def watch(target: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Look:
        with doing("Capturing the model", show):
            captured = capture(target, args, kwargs, leaf_modules=leaf_modules)
        tensors = captured.inputs(args, kwargs).values()
        device = next((tensor.device for tensor in tensors), torch.device(CPU))
        with doing("Measuring the model", show):
            cache = strategy_option(config, "cache")
            measure = functools.partial(profile_costs, captured, args, kwargs)
            costs, notes = profiled(cache is None or cache, captured, device, measure)
        return Look(captured, size, costs, notes)

    return until_first_call(config, watch, first_microbatch)


def until_first_call(
    config: DictConfig,
    watch: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Seen],
    changed: Callable[[Any], Any],
) -> Seen:
    """Trains a recipe's module on one device, and ends before the first forward.

    Args:
        config: of the run.
        watch: is given the pipelined module and the arguments of its first call.
        changed: makes the batch that the step is given.

    Returns:
        What ``watch`` returns.

    Raises:
        ValueError: the step never calls the forward.
    """
    QuietConsole()
    module, data = build_recipe(config)
    target = pipelined_module(module, strategy_option(config, "module"))
    alone = {"devices": 1, "strategy": "auto", "callbacks": [], "logger": False}
    accelerator = config.trainer.get("accelerator")
    if OmegaConf.is_config(accelerator) or accelerator in ("emulated", "pool"):
        alone["accelerator"] = "cpu"  # those that only pipelines run on
    quiet = ("checkpointing", "model_summary", "progress_bar")
    alone |= {f"enable_{name}": False for name in quiet}
    trainer: Trainer = instantiate(config.trainer, num_sanity_val_steps=0, **alone)
    own_step, seen = module.training_step, list[Seen]()

    @functools.wraps(own_step)
    def step(batch: Any, *args: Any, **kwargs: Any) -> Any:
        return own_step(changed(batch), *args, **kwargs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with taken_away(target, "forward", None):
            seen.append(watch(target, args, kwargs))
        raise SeenError

    with (
        instance_attribute(module, "training_step", step),
        instance_attribute(target, "forward", forward),
        contextlib.suppress(SeenError),
    ):
        trainer.fit(module, datamodule=data)
    if not seen:
        raise ValueError(
            f"training_step of {type(module).__name__} did not call the pipelined forward of "
            f"{type(target).__name__}; name the sub-module that it calls: strategy.module=..."
        )
    return seen[0]
