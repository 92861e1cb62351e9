"""Optimizers of parameters of which a rank has parts: their state lies as the parameters do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gpp.strategy.spmd.sharded_partition import ShardedPartition
from lightning_gpp.strategy.state.optimizers import NamesParameters, PartialOptimizer

ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad),
    *(torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop, torch.optim.SparseAdam),
)
"""Optimizers that treat every element of a parameter by itself, so that parts of it suffice."""


def check_elementwise(optimizer: Optimizer, sharded: Sequence[str]) -> None:
    """Refuses optimizers that look at a parameter as a whole, where there are parts of some.

    Raises:
        TypeError: it is not known to treat every element by itself.
    """
    if sharded and type(optimizer) not in ELEMENTWISE:
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise TypeError(
            f"{type(optimizer).__name__} is not known to treat every element of a parameter by "
            f"itself, and the program divides {sharded[0]!r} and {len(sharded) - 1} others over "
            f"the devices. Use one of {known}, or HAPStrategy(planner='data_parallel'), which "
            "stores every parameter whole"
        )


@dataclass(slots=True)
class ShardedOptimizer(PartialOptimizer):
    """An optimizer of parameters that are whole, in parts, or on rank 0 alone.

    Attributes:
        partition: knows which.
    """

    partition: ShardedPartition | None = None

    @classmethod
    def of(
        cls, optimizer: Optimizer, partition: ShardedPartition, held: Sequence[nn.Parameter]
    ) -> ShardedOptimizer:
        """Takes the optimizer of a module that is still whole."""
        check_elementwise(optimizer, list(partition.storage))
        base = PartialOptimizer.keep(optimizer, partition, held)
        return cls(base.optimizer, base.names, base.kept, partition)

    @property
    def _divided(self) -> ShardedPartition:
        assert self.partition is not None
        return self.partition

    def place_state(self) -> None:
        """State of the whole parameters, out of a checkpoint, becomes that of the parts."""
        partition = self._divided
        for name, placement in partition.storage.items():
            state = self.optimizer.state.get(partition.stored(name), {})
            for key, value in state.items():
                if isinstance(value, Tensor) and tuple(value.shape) == partition.whole_shape(name):
                    rank = partition.rank
                    state[key] = partition.shards.cut(value, placement, rank).clone()
        PartialOptimizer.place_state(self)

    def adopt_new_groups(
        self, module: NamesParameters, held: Callable[[], Sequence[nn.Parameter]]
    ) -> None:
        """Drops what this rank does not hold from groups that were added since.

        Raises:
            NotImplementedError: such a group has a parameter that is divided.
        """
        for group in self.optimizer.param_groups[len(self.names) :]:
            if any(parameter.is_meta for parameter in group["params"]):
                raise NotImplementedError(
                    "a group with divided parameters was added to the optimizer while training; "
                    "give it to the optimizer in configure_optimizers"
                )
        PartialOptimizer.adopt_new_groups(self, module, held)

    def merged(self, gathered: Sequence[dict[int, dict[str, Any]]]) -> dict[int, dict[str, Any]]:
        """State by index on one device, of that of all ranks."""
        state = PartialOptimizer.merged(self, gathered)
        partition, names = self._divided, [name for group in self.names for name in group]
        for index in list(state):
            if names[index] in partition.storage:
                parts = [of_rank[index] for of_rank in gathered]
                state[index] = self._joined(names[index], parts)
        return state

    def _joined(self, name: str, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        partition = self._divided
        shapes = partition.shards.shapes(partition.whole_shape(name), partition.storage[name])
        joined = {}
        for key, value in parts[0].items():
            is_part = isinstance(value, Tensor) and value.dim() > 0
            if is_part and tuple(value.shape) == shapes[0]:
                value = partition.join(name, [each[key] for each in parts])
            joined[key] = value
        return joined
