"""Cutting tensors into the parts of the devices and joining them again, by placement and shares.

A sharded dimension of length ``outer * units * block`` is dealt in units: a device has the same
units of each of the ``outer`` parts (:class:`~lightning_gpp.spmd.placement.Placement`)::

    outer=2, units=3, block=1, two devices with 2 and 1 units:   a b c | d e f
    device 0: a b d e        device 1: c f
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_gpp.spmd.placement import Placement, units_per_device

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shards:
    """How tensors are dealt to the devices.

    Attributes:
        shares: of the devices.
    """

    shares: tuple[float, ...]
    _counts: dict[int, tuple[int, ...]] = field(default_factory=dict, compare=False)

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.shares)

    def units(self, placement: Placement) -> tuple[int, ...]:
        """Units of every device."""
        assert placement.units is not None
        if placement.units not in self._counts:
            self._counts[placement.units] = units_per_device(placement.units, self.shares)
        return self._counts[placement.units]

    def start(self, placement: Placement, device: int) -> int:
        """The first unit of a device."""
        return sum(self.units(placement)[:device])

    def shape(self, whole: Sequence[int], placement: Placement, device: int) -> Shape:
        """Sizes of what a device has of a tensor of sizes ``whole``."""
        shape = list(whole)
        if placement.is_shard:
            dim = placement.dim
            assert dim is not None
            block = placement.block(shape[dim])
            shape[dim] = placement.outer * self.units(placement)[device] * block
        return tuple(shape)

    def shapes(self, whole: Sequence[int], placement: Placement) -> list[Shape]:
        """The same for every device."""
        return [self.shape(whole, placement, device) for device in range(self.num_devices)]

    def cut(self, tensor: Tensor, placement: Placement, device: int) -> Tensor:
        """What a device has of a whole tensor; a view of it where that is possible.

        >>> import torch
        >>> from lightning_gpp.spmd.placement import shard
        >>> shards = Shards((0.6, 0.4))
        >>> shards.cut(torch.arange(6), shard(0, 3, outer=2), 0).tolist()
        [0, 1, 3, 4]
        """
        dim, block = self._seen(tensor.shape, placement)
        start, count = self.start(placement, device), self.units(placement)[device]
        if placement.outer == 1:
            return tensor.narrow(dim, start * block, count * block)
        parts = _outer_parts(tensor, dim, placement.outer)
        return parts.narrow(dim + 1, start * block, count * block).flatten(dim, dim + 1)

    def cut_all(self, tensor: Tensor, placement: Placement) -> list[Tensor]:
        """What every device has of a whole tensor."""
        return [self.cut(tensor, placement, device) for device in range(self.num_devices)]

    def join(self, parts: Sequence[Tensor], placement: Placement) -> Tensor:
        """The whole tensor of the parts of all devices."""
        dim = placement.dim
        assert dim is not None
        if placement.outer == 1:
            return torch.cat(list(parts), dim)
        seen = [_outer_parts(part, dim, placement.outer) for part in parts]
        return torch.cat(seen, dim + 1).flatten(dim, dim + 1)

    def pad(self, part: Tensor, whole: Sequence[int], placement: Placement, device: int) -> Tensor:
        """A whole tensor that is zero outside of the part of a device."""
        padded = part.new_zeros(tuple(whole))
        dim, block = self._seen(whole, placement)
        start, count = self.start(placement, device), self.units(placement)[device]
        rows = _outer_parts(padded, dim, placement.outer)
        seen = _outer_parts(part, dim, placement.outer)
        rows.narrow(dim + 1, start * block, count * block).copy_(seen)
        return padded

    def _seen(self, whole: Sequence[int], placement: Placement) -> tuple[int, int]:
        """The sharded dimension, and elements of one of its units."""
        assert placement.dim is not None
        return placement.dim, placement.block(whole[placement.dim])


def _outer_parts(part: Tensor, dim: int, outer: int) -> Tensor:
    """The sharded dimension of a part as (outer, the units of each); a view where it can be."""
    shape = part.shape
    return part.reshape(*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :])
