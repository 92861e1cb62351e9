"""Divides a module and its optimizers over ranks by an SPMD program, and makes them whole again.

What an SPMD program stores whole lies on every rank in the module itself. What it stores in parts
is taken out of the module, as what other ranks hold is in a pipeline: its place has a ``meta``
tensor of its whole size, so that names, shapes and keys stay complete and user code that wants its
values gets an error. The parameter object itself, which the optimizer knows, becomes the part; the
state of optimizers lies as the parameters do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp.spmd.placement import Placement
from lightning_gpp.spmd.run.moves import Shards
from lightning_gpp.strategy.ranks.control import Control
from lightning_gpp.strategy.state.optimizers import PartialOptimizer
from lightning_gpp.strategy.state.partition import Partition

ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad),
    *(torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop, torch.optim.SparseAdam),
)
"""Optimizers that treat every element of a parameter by itself, so that parts of it suffice."""


class ShardedPartition(Partition):
    """The module on this rank, which holds all or parts of each parameter.

    Args:
        module: the whole LightningModule.
        storage: name in the LightningModule -> placement of what all ranks have; the rest of the
            module belongs to rank 0.
        shards: how parts are divided.
        control: how to reach the other ranks.
        device: where this rank's tensors are.
    """

    def __init__(
        self,
        module: nn.Module,
        storage: Mapping[str, Placement],
        shards: Shards,
        control: Control,
        device: torch.device,
    ) -> None:
        super().__init__(module, {n: range(control.num_ranks) for n in storage}, control, device)
        names = [name for name, where in storage.items() if where.is_shard and name in self._places]
        self.storage = {name: storage[name] for name in names}
        self.shards = shards
        self._parts: dict[str, Tensor] = {}
        self._agreed: dict[str, bool] = {}
        self._put_aside: dict[str, tuple[Tensor, Tensor | None]] = {}

    # Parts -----------------------------------------------------------------------------------

    def _keep(self, name: str) -> None:
        """Of what is divided this rank's part goes onto its device, and not the whole."""
        if name not in self.storage:
            super()._keep(name)
            return
        self._parts[name] = whole = self._tensor(name)
        part = self.shards.cut(whole.detach(), self.storage[name], self.rank).clone()
        self._replace(name, torch.empty_like(whole, device="meta"))
        whole.data = part.to(self.device)
        self._agreed[name] = whole.requires_grad

    def stored(self, name: str) -> Tensor:
        """This rank's part of a parameter or buffer."""
        return self._parts[name] if name in self._parts else self._tensor(name)

    def agree_on_gradients(self) -> None:
        """What was frozen, be it what stands in the module or the part, freezes the other."""
        for name, part in self._parts.items():
            standing, before = self._tensor(name), self._agreed[name]
            is_trained = part.requires_grad
            if standing.requires_grad != before:
                is_trained = standing.requires_grad
            part.requires_grad_(is_trained)
            standing.requires_grad_(is_trained)
            self._agreed[name] = is_trained

    def show_gradients(self) -> None:
        """What stands in the module for a part has a gradient, of no values, if the part has one.

        So user code sees which parameters have gradients, gets an error where it wants their
        values (of which a rank has a part), and can clear them.
        """
        for name, part in self._parts.items():
            standing = self._tensor(name)
            if standing.is_meta:
                standing.grad = None if part.grad is None else torch.empty_like(standing)

    def clear_gradients(self) -> None:
        """Gradients that were cleared in the module (``module.zero_grad()``) are so in parts."""
        for name, part in self._parts.items():
            standing = self._tensor(name)
            if standing.is_meta and standing.grad is None:
                part.grad = None

    @contextmanager
    def parts_in_place(self) -> Iterator[None]:
        """The module has the parts themselves while the body runs, which optimizers know."""
        standing = {name: self._tensor(name) for name in self._parts}
        self._put(self._parts)
        try:
            yield
        finally:
            self._put(standing)
            self.agree_on_gradients()

    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            for place in self._places[name]:
                place.put(tensor)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that an optimizer has of the module, this rank's parts among them."""
        for name, parameter in super().named_parameters():
            part = self._parts.get(name, parameter)
            assert isinstance(part, nn.Parameter)
            yield name, part

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Sizes of a whole parameter."""
        return tuple(self._tensor(name).shape)

    # What a partition answers ----------------------------------------------------------------

    def held_with_others(self) -> dict[str, nn.Parameter]:
        """Parameters that all ranks hold whole, by name."""
        found = super().held_with_others()
        return {name: each for name, each in found.items() if name not in self.storage}

    def whole_values(self) -> dict[str, Tensor]:
        """All ranks: on rank 0, which holds the rest, the CPU values of what is divided."""
        own = {(self.rank, name): part.detach().cpu() for name, part in self._parts.items()}
        found = self.control.collect(own, "gathering the weights on rank 0", self.stores)
        ranks = range(self.control.num_ranks)
        return {
            name: self.shards.join([found[rank, name] for rank in ranks], self.storage[name])
            for name in (self._parts if found else ())
        }

    def make_whole(self, values: Mapping[str, Tensor]) -> None:
        """Puts given values where this rank has ``meta`` tensors; a part becomes the whole."""
        divided = {name: value for name, value in values.items() if name in self._parts}
        super().make_whole({n: value for n, value in values.items() if n not in divided})
        for name, value in divided.items():
            part = self._parts[name]
            if name not in self._put_aside:
                self._put_aside[name] = part.data, part.grad
            part.grad = None
            part.data = value  # on the CPU, where there is room for all parts
            self._put({name: part})

    def make_partial(self) -> None:
        """Undoes :meth:`make_whole`."""
        super().make_partial()
        for name, (data, gradient) in self._put_aside.items():
            part = self._parts[name]
            self._replace(name, torch.empty_like(part, device="meta"))
            part.data, part.grad = data, gradient
        self._put_aside = {}
        self.show_gradients()

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Takes this rank's parts of the values of whole parameters, of a checkpoint."""
        for name, part in self._parts.items():
            if name in values:
                with torch.no_grad():
                    part.copy_(self.shards.cut(values[name], self.storage[name], self.rank))

    @property
    def is_partial(self) -> bool:
        """Whether other ranks hold something that this one does not."""
        return bool(self.storage) or super().is_partial

    def counted_parameters(self) -> list[nn.Parameter]:
        """Parameters that count on this rank: parts on all, whole ones on one."""
        whole = [name for name in self._counted if name not in self.storage]
        return self._parameters([*whole, *self._parts])


class ShardedOptimizer(PartialOptimizer):
    """An optimizer of parameters that are whole, divided, or on rank 0 only."""

    partition: ShardedPartition

    def check(self) -> None:
        """Before the module is divided.

        Raises:
            TypeError: there are parts of parameters, and it is not known to treat every element by
                itself.
        """
        sharded, kind = list(self.partition.storage), type(self.optimizer)
        if sharded and kind not in ELEMENTWISE:
            known = ", ".join(each.__name__ for each in ELEMENTWISE)
            raise TypeError(
                f"{kind.__name__} may compute with whole parameters, but strategy='hap' divides "
                f"{sharded[0]!r} and {len(sharded) - 1} others over the devices. Use one of "
                f"{known}, or HAPStrategy(planner='data_parallel'), which stores them whole"
            )

    def place_state(self) -> None:
        """State of the whole parameters, out of a checkpoint, becomes that of the parts."""
        partition = self.partition
        for name, placement in partition.storage.items():
            state = self.optimizer.state.get(partition.stored(name), {})
            for key, value in state.items():
                if isinstance(value, Tensor) and tuple(value.shape) == partition.whole_shape(name):
                    rank = partition.rank
                    state[key] = partition.shards.cut(value, placement, rank).clone()
        super().place_state()

    def whole_state_dict(self) -> dict[str, Any]:
        """All ranks: on rank 0 the state dict that one device would write, else this rank's own."""
        control = self.partition.control
        own = {(control.rank, index): each for index, each in self.state_by_index().items()}
        found = self._gathered(own)
        if not control.is_leader:
            return self.optimizer.state_dict()
        state = {index: found[rank, index] for rank, index in sorted(found, reverse=True)}
        partition, names = self.partition, [name for group in self.names for name in group]
        for index in list(state):
            if (name := names[index]) not in partition.storage:
                continue
            place = partition.storage[name]
            part_shape = partition.shards.shape(partition.whole_shape(name), place, 0)
            parts = [found[rank, index] for rank in range(control.num_ranks)]
            state[index] = {
                key: partition.shards.join([each[key] for each in parts], place)
                if isinstance(value, Tensor) and value.dim() and tuple(value.shape) == part_shape
                else value
                for key, value in parts[0].items()
            }
        return self._state_dict(state)
