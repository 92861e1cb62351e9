"""A configuration of the command line, trained as a rank of a pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from helpers.training import quiet
from lightning_gpp.jobs.train import train


def train_configuration(overrides: Sequence[str], folder: Path) -> dict[str, float]:
    """Composes and trains as ``graphpipe`` would, with the processes that are there.

    Args:
        overrides: as on the command line.
        folder: run folder.

    Returns:
        The final metrics by name, as the run would report them.
    """
    with initialize_config_module("lightning_gpp.configs", version_base="1.3"):
        config = compose("config", overrides=[*overrides, f"paths.output_dir={folder}"])
    with quiet():
        return train(config)


def train_resolved(plain: Mapping[str, Any]) -> dict[str, float]:
    """Trains a configuration that another process has composed and resolved.

    Args:
        plain: the configuration; how it would start processes does not matter.

    Returns:
        The final metrics by name.
    """
    config = OmegaConf.create(dict(plain))
    config.strategy.start_method = "popen"
    with quiet():
        warnings.filterwarnings("error", ".*ambiguous collection")  # steps say their batch size
        return train(config)
