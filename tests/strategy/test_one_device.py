"""The strategy for one device under a pipeline's configuration."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_gpp.strategy import GraphPipeStrategy, single_device


def test_takes_every_option_of_the_pipeline() -> None:
    options: dict[str, Any] = dict.fromkeys(inspect.signature(GraphPipeStrategy).parameters)
    del options["lightning"]
    strategy = single_device(**options | {"num_microbatches": 8})
    assert type(strategy) is SingleDeviceStrategy
    assert strategy.root_device == torch.device("cpu")


def test_options_of_lightning_are_kept() -> None:
    io, precision = TorchCheckpointIO(), DoublePrecision()
    strategy = single_device("meta", checkpoint_io=io, precision_plugin=precision)
    assert strategy.root_device == torch.device("meta")
    assert strategy.checkpoint_io is io
    assert strategy.precision_plugin is precision


def test_other_options_are_refused() -> None:
    with pytest.raises(TypeError, match=r"got num_microbatch, which is no option.*schedule"):
        single_device(num_microbatches=8, num_microbatch=8)
