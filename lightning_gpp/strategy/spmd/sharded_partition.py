"""Which rank holds which part of which parameter, and the module made partial or whole.

What an SPMD program stores whole lies on every rank in the module itself. What it stores in parts
is taken out of the module, as what other ranks hold is in a pipeline: its place has a ``meta``
tensor of its whole size, so that names, shapes and keys stay complete and user code that wants its
values gets an error. The parameter object itself, which the optimizer knows, becomes the part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_gpp.spmd.placement import Placement
from lightning_gpp.spmd.run.shards import Shards
from lightning_gpp.strategy.ranks.control import Control
from lightning_gpp.strategy.state.partition import Partition, ownership


class ShardedPartition(Partition):
    """The module of this rank, of which it has all or parts.

    Args:
        module: the whole LightningModule.
        storage: name in the LightningModule -> placement of what all ranks have; the rest of the
            module belongs to rank 0.
        shards: how parts are dealt.
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
        readers = {name: range(control.num_ranks) for name in storage}
        super().__init__(module, ownership(module, readers), control, device)
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
        whole.data = part.to(self._device)
        self._agreed[name] = whole.requires_grad

    def stored(self, name: str) -> Tensor:
        """What this rank has of a parameter or buffer."""
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
        for name, parameter in self.module.named_parameters():
            part = self._parts.get(name, parameter)
            assert isinstance(part, nn.Parameter)
            yield name, part

    def join(self, name: str, parts: list[Tensor]) -> Tensor:
        """A tensor that is dealt like a parameter, from the parts of all ranks."""
        return self.shards.join(parts, self.storage[name])

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Sizes of a whole parameter."""
        return tuple(self._tensor(name).shape)

    # What a partition answers ----------------------------------------------------------------

    def copies(self) -> list[str]:
        """Names of what several ranks hold whole."""
        return [name for name in super().copies() if name not in self.storage]

    def whole_values(self) -> dict[str, Tensor]:
        """All ranks: on rank 0 the CPU values of what it does not hold whole."""
        values = super().whole_values()
        own = {name: part.detach().cpu() for name, part in self._parts.items()}
        gathered = self._control.gather(own, "gathering the parts of the weights on rank 0")
        if gathered:
            for name in own:
                values[name] = self.join(name, [parts[name] for parts in gathered])
        return values

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
        whole = [name for name in self.owners.counted_by(self.rank) if name not in self.storage]
        tensors = [self._tensor(name) for name in whole] + list(self._parts.values())
        return [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
