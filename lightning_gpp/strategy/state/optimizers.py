"""Optimizers of a partial module.

The user's ``configure_optimizers`` sees the whole module. Then every rank keeps, in each parameter
group, the parameters it holds; empty groups stay, so that groups, schedulers and checkpoints keep
the indices they have on one device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_gpp.common.mapped_tensor import in_memory
from lightning_gpp.strategy.ranks.control import Control

NamesParameters = Any
"""A module, or what stands for it: has ``named_parameters``, each once."""


@dataclass(slots=True)
class PartialOptimizer:
    """An optimizer of which this rank keeps the parameters it holds.

    Attributes:
        optimizer: the user's.
        names: for every group the names of all its parameters, as on one device.
        kept: for every group the positions of the parameters that this rank keeps.
    """

    optimizer: Optimizer
    names: list[list[str]]
    kept: list[list[int]]

    @classmethod
    def keep(
        cls, optimizer: Optimizer, module: NamesParameters, held: Sequence[nn.Parameter]
    ) -> PartialOptimizer:
        """Drops what this rank does not hold from an optimizer of the whole module.

        Args:
            optimizer: of the whole module; ``module`` is still whole.
            module: names the parameters.
            held: the parameters that this rank holds.

        Raises:
            TypeError: the optimizer looks at all parameters together, so it cannot be split.
        """
        own = {id(parameter) for parameter in held}
        is_split = any(id(p) not in own for g in optimizer.param_groups for p in g["params"])
        if is_split and isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                "LBFGS takes inner products over all parameters, which are spread over ranks here; "
                "use an optimizer that treats every parameter by itself (SGD, Adam, AdamW, ...)"
            )
        found = cls(optimizer, [], [])
        for parameter in found._drop_from_groups(module, held):
            optimizer.state.pop(parameter, None)
        return found

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
    def whole_groups(self, module: NamesParameters, held: Sequence[nn.Parameter]) -> Iterator[None]:
        """Groups have all parameters of one device while the body runs, on ``meta`` if elsewhere.

        The body may add groups and load state; what this rank does not hold is dropped after.
        """
        self._fill_groups(module)
        yield
        whole = PartialOptimizer.keep(self.optimizer, module, held)
        self.names, self.kept = whole.names, whole.kept
        self.place_state()

    def adopt_new_groups(
        self, module: NamesParameters, held: Callable[[], Sequence[nn.Parameter]]
    ) -> None:
        """Drops what this rank does not hold from groups that were added since."""
        if len(self.optimizer.param_groups) > len(self.names):
            self._drop_from_groups(module, held())

    def _drop_from_groups(
        self, module: NamesParameters, held: Sequence[nn.Parameter]
    ) -> list[nn.Parameter]:
        """Drops what is not held from groups that are not known yet; returns it."""
        name_of = {id(parameter): name for name, parameter in module.named_parameters()}
        held_ids = {id(parameter) for parameter in held}
        dropped: list[nn.Parameter] = []
        for group in self.optimizer.param_groups[len(self.names) :]:
            if any(id(parameter) not in name_of for parameter in group["params"]):
                raise ValueError(
                    "the optimizer holds a parameter that is no parameter of the LightningModule "
                    "(make what it belongs to an attribute of the module), or one that an SPMD "
                    "program divides (give it to the optimizer in configure_optimizers)"
                )
            self.names.append([name_of[id(p)] for p in group["params"]])
            self.kept.append([i for i, p in enumerate(group["params"]) if id(p) in held_ids])
            dropped += [p for p in group["params"] if id(p) not in held_ids]
            group["params"] = [p for p in group["params"] if id(p) in held_ids]
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

    def state_by_index(
        self, counted: Iterable[nn.Parameter] | None = None
    ) -> dict[int, dict[str, Any]]:
        """State of the parameters of this rank by their index on one device, on the CPU.

        Args:
            counted: of these only; by default of all.
        """
        ids = None if counted is None else {id(parameter) for parameter in counted}
        return {
            index: pytree.tree_map_only(
                Tensor, lambda leaf: leaf.detach().cpu(), dict(self.optimizer.state[parameter])
            )
            for index, parameter in self.held_by_index().items()
            if parameter in self.optimizer.state and (ids is None or id(parameter) in ids)
        }

    def whole_state_dict(
        self, control: Control, store: Callable[[Tensor], Tensor]
    ) -> dict[str, Any]:
        """All ranks: on rank 0 the state dict that one device would write, else this rank's own.

        Args:
            control: how to reach the other ranks.
            store: where rank 0 keeps a tensor of another.
        """
        found = control.collect(
            self.state_by_index(),
            "gathering the optimizer state on rank 0",
            partial(pytree.tree_map_only, Tensor, store),
        )
        return self._state_dict(found) if control.is_leader else self.optimizer.state_dict()

    def counted_state_dict(self, counted: Iterable[nn.Parameter]) -> dict[str, Any]:
        """What one device would write, with the state of these parameters of this rank only."""
        return self._state_dict(self.state_by_index(counted))

    def _state_dict(self, state: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """As one device would write it."""
        indices = itertools.count()
        groups = [
            {**group, "params": list(itertools.islice(indices, len(names)))}
            for group, names, _ in self._groups()
        ]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def make_whole(self, module: nn.Module, state: dict[str, Any]) -> None:
        """Gives the optimizer all parameters of the whole module back, with their state."""
        self._fill_groups(module)
        self.optimizer.load_state_dict(state)

    def _fill_groups(self, module: NamesParameters) -> None:
        """Groups get all parameters that they have on one device."""
        parameters = dict(module.named_parameters())
        for group, names, kept in self._groups():
            own = dict(zip(kept, group["params"], strict=True))
            group["params"] = [own.get(i, parameters[name]) for i, name in enumerate(names)]
