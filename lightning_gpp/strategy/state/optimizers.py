"""Optimizers of which every rank steps the parameters that it holds.

The user's ``configure_optimizers`` sees the whole module. Then every rank keeps, in each parameter
group, the parameters it holds; empty groups stay, so that groups, schedulers and checkpoints keep
the indices they have on one device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_gpp.common.mapped_tensor import in_memory
from lightning_gpp.strategy.state.partition import Partition


@dataclass(slots=True)
class PartialOptimizer:
    """An optimizer reduced to the parameters of this rank.

    Attributes:
        optimizer: the user's.
        partition: the parameters of this rank, and their names.
        names: for every group the names of all its parameters, as on one device.
        kept: for every group the positions of the parameters that this rank keeps.
    """

    optimizer: Optimizer
    partition: Partition
    names: list[list[str]] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)

    def check(self) -> None:
        """Before the module is divided; a kind that cannot divide an optimizer raises TypeError."""

    def keep_held(self) -> None:
        """Drops what this rank does not hold from the groups of one device."""
        self.names, self.kept = [], []
        for parameter in self._drop_from_groups():
            self.optimizer.state.pop(parameter, None)

    def place_state(self) -> None:
        """The state of parameters goes where they are; what only counts steps, as torch has it."""
        for group in self.optimizer.param_groups:
            counts_there = group.get("fused") or group.get("capturable")
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, Tensor) and (value.dim() > 0 or counts_there):
                        state[key] = in_memory(value).to(parameter.device)

    @contextmanager
    def whole_groups(self) -> Iterator[None]:
        """Groups have all parameters of one device while the body runs, on ``meta`` if elsewhere.

        The body may add groups and load state; what this rank does not hold is dropped after.
        """
        self._fill_groups()
        yield
        self.keep_held()
        self.place_state()

    def adopt_new_groups(self) -> None:
        """Drops what this rank does not hold from groups that were added since."""
        if len(self.optimizer.param_groups) > len(self.names):
            self._drop_from_groups()

    def _drop_from_groups(self) -> list[nn.Parameter]:
        """Drops what is not held from groups that are not known yet; returns it."""
        name_of = {id(parameter): name for name, parameter in self.partition.named_parameters()}
        held = set(map(id, self.partition.held_parameters()))
        dropped: list[nn.Parameter] = []
        for group in self.optimizer.param_groups[len(self.names) :]:
            if any(id(parameter) not in name_of for parameter in group["params"]):
                raise ValueError(
                    "the optimizer holds a parameter that the LightningModule does not have. Make "
                    "its module an attribute of the LightningModule, and with strategy='hap' give "
                    "all parameters to the optimizer in configure_optimizers"
                )
            self.names.append([name_of[id(p)] for p in group["params"]])
            self.kept.append([i for i, p in enumerate(group["params"]) if id(p) in held])
            dropped += [p for p in group["params"] if id(p) not in held]
            group["params"] = [p for p in group["params"] if id(p) in held]
        return dropped

    def held_by_index(self) -> dict[int, nn.Parameter]:
        """The parameters that this rank keeps, by their indices on one device."""
        found: dict[int, nn.Parameter] = {}
        offset = 0
        for group, names, kept in self._groups():
            found |= {offset + i: p for i, p in zip(kept, group["params"], strict=True)}
            offset += len(names)
        return found

    def _groups(self) -> Iterator[tuple[dict[str, Any], list[str], list[int]]]:
        return zip(self.optimizer.param_groups, self.names, self.kept, strict=True)

    def state_by_index(self, *, counted_only: bool = False) -> dict[int, dict[str, Any]]:
        """State of the parameters of this rank by their index on one device, on the CPU.

        Args:
            counted_only: whether only of those that count on this rank.
        """
        counted = set(map(id, self.partition.counted_parameters()))
        return {
            index: pytree.tree_map_only(
                Tensor, lambda leaf: leaf.detach().cpu(), dict(self.optimizer.state[parameter])
            )
            for index, parameter in self.held_by_index().items()
            if parameter in self.optimizer.state and (not counted_only or id(parameter) in counted)
        }

    def whole_state_dict(self) -> dict[str, Any]:
        """All ranks: on rank 0 the state dict that one device would write, else this rank's own."""
        found = self._gathered(self.state_by_index())
        is_leader = self.partition.control.is_leader
        return self._state_dict(found) if is_leader else self.optimizer.state_dict()

    def _gathered(self, own: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
        store = partial(pytree.tree_map_only, Tensor, self.partition.stores)
        purpose = "gathering the optimizer state on rank 0"
        return self.partition.control.collect(own, purpose, store)

    def counted_state_dict(self) -> dict[str, Any]:
        """The state dict of one device, with the state that only this rank counts."""
        return self._state_dict(self.state_by_index(counted_only=True))

    def _state_dict(self, state: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """As one device would write it."""
        indices = itertools.count()
        groups = [
            {**group, "params": list(itertools.islice(indices, len(names)))}
            for group, names, _ in self._groups()
        ]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def make_whole(self, state: dict[str, Any]) -> None:
        """Gives the optimizer all parameters of the whole module back, with their state."""
        self._fill_groups()
        self.optimizer.load_state_dict(state)

    def _fill_groups(self) -> None:
        """Groups get all parameters that they have on one device."""
        parameters = dict(self.partition.named_parameters())
        for group, names, kept in self._groups():
            own = dict(zip(kept, group["params"], strict=True))
            group["params"] = [own.get(i, parameters[name]) for i, name in enumerate(names)]
