"""Averages of weights that Lightning's callbacks keep (EMA, SWA): ranks average what they hold.

Such a callback has a copy of the whole module, goes through the parameters of both, and exchanges
them for validation. While the pipeline runs, the copy of a rank has what its module has; the rest
is on ``meta``, where arithmetic costs nothing. Its state dict is that of all ranks together, so
that checkpoints are those of one device.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.strategy.lightning_private import averages_kept_by
from lightning_gpp.strategy.state.partition import Partition


class HeldAverage:
    """A callback's copy of the module, of which this rank has what it has of the module.

    All ranks make it, and call :meth:`reunite`, together.

    Args:
        average: the copy, whole on rank 0.
        partition: of the module.
    """

    def __init__(self, average: nn.Module, partition: Partition) -> None:
        self._average = average
        inner = average.module if isinstance(average, AveragedModel) else average
        self._partition = partition.of_copy(inner)
        self._partition.spread()
        self._replaced = ExitStack()
        for name in ("state_dict", "to"):
            method = getattr(self, f"_{name}")
            self._replaced.enter_context(instance_attribute(average, name, method))

    def _state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """All ranks: on rank 0 the state dict of all; elsewhere with ``meta`` tensors."""
        with self._partition.whole():
            state: dict[str, Any] = type(self._average).state_dict(self._average, *args, **kwargs)
        return state

    def _to(self, device: Any) -> nn.Module:
        """Moves what this rank has; there is nothing to move on ``meta``."""
        self._partition.move(device)
        return self._average

    def reunite(self, *, on_all_ranks: bool) -> None:
        """All ranks: the copy is whole again on rank 0.

        Args:
            on_all_ranks: whether everywhere.
        """
        self._replaced.close()
        self._partition.reunite(on_all_ranks=on_all_ranks)


def held_averages(trainer: pl.Trainer, partition: Partition) -> list[HeldAverage]:
    """All ranks: divides the averages that callbacks keep, as the module is divided.

    Args:
        trainer: with the callbacks.
        partition: of the module.
    """
    averages = averages_kept_by(trainer.callbacks)  # type: ignore[attr-defined]
    return [HeldAverage(average, partition) for average in averages]
