"""Training on one device with the same configuration, for comparisons."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_gpp.strategy.gnnpipe import GNNPipeStrategy
from lightning_gpp.strategy.graphpipe import GraphPipeStrategy


def single_device(
    device: str | torch.device = "cpu",
    *,
    accelerator: Accelerator | None = None,
    checkpoint_io: CheckpointIO | None = None,
    precision_plugin: Precision | None = None,
    **pipeline_options: Any,
) -> SingleDeviceStrategy:
    """Lightning's own strategy for one device; options of a pipeline are taken and not used.

    So a configuration written for :class:`~lightning_gpp.GraphPipeStrategy` or
    :class:`~lightning_gpp.GNNPipeStrategy` trains on one device by exchanging the strategy alone,
    with its micro-batches, chunks and plan left in place.

    Args:
        device: where to train.
        accelerator: as in Lightning.
        checkpoint_io: as in Lightning.
        precision_plugin: as in Lightning.
        **pipeline_options: any further options of the two.

    Raises:
        TypeError: an option that neither has.

    >>> single_device(num_microbatches=8).root_device
    device(type='cpu')
    """
    known = {
        **inspect.signature(GraphPipeStrategy).parameters,
        **inspect.signature(GNNPipeStrategy).parameters,
    }
    del known["lightning"]
    if unknown := pipeline_options.keys() - known:
        raise TypeError(
            f"single_device got {', '.join(sorted(unknown))}, which is no option of "
            f"GraphPipeStrategy or GNNPipeStrategy either; they have {', '.join(known)}"
        )
    return SingleDeviceStrategy(
        device, accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin
    )
