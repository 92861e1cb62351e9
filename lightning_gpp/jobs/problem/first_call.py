"""A training on one device, up to the first call of the pipelined forward or somewhat further."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from omegaconf import DictConfig, OmegaConf
from torch import nn

from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.jobs.console import QuietConsole
from lightning_gpp.jobs.problem.problem import strategy_option
from lightning_gpp.jobs.train import build_recipe
from lightning_gpp.strategy.pipeline import pipelined_module

Step = Callable[..., Any]
"""A ``training_step``."""


class SeenError(Exception):
    """Ends a training that has shown what it was asked for."""


def on_one_device(
    config: DictConfig, **options: Any
) -> tuple[Trainer, LightningModule, LightningDataModule]:
    """A recipe's module and data, and a Trainer that leaves nothing behind.

    Args:
        config: of the run.
        **options: further ones of the Trainer.
    """
    QuietConsole()
    module, data = build_recipe(config)
    alone = {"devices": 1, "strategy": "auto", "callbacks": [], "logger": False} | options
    accelerator = config.trainer.get("accelerator")
    if OmegaConf.is_config(accelerator) or accelerator in ("emulated", "pool"):
        alone.setdefault("accelerator", "cpu")  # those that only pipelines run on
    trainer: Trainer = instantiate(
        config.trainer,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **alone,
    )
    return trainer, module, data


def until_first_call(
    config: DictConfig,
    watch: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None],
    wrapped: Callable[[LightningModule], Step] = lambda module: module.training_step,
) -> None:
    """Trains a recipe's module on one device, and ends before the first forward.

    Args:
        config: of the run.
        watch: is given the pipelined module and the arguments of its first call.
        wrapped: makes the step that is taken from the module's own.

    Raises:
        ValueError: the step never calls the forward.
    """
    trainer, module, data = on_one_device(config)
    target = pipelined_module(module, strategy_option(config, "module"))

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = target.__dict__.pop("forward")
        try:
            watch(target, args, kwargs)
        finally:
            target.__dict__["forward"] = own
        raise SeenError

    with (
        instance_attribute(module, "training_step", wrapped(module)),
        instance_attribute(target, "forward", forward),
    ):
        try:
            trainer.fit(module, datamodule=data)
        except SeenError:
            return
    raise ValueError(
        f"training_step of {type(module).__name__} did not call the pipelined forward of "
        f"{type(target).__name__}; name the sub-module that it calls: strategy.module=..."
    )
