"""Cutting tensors into the parts of the devices and joining them again, by placement and shares.

A sharded dimension of length ``outer * units * block`` is divided in units: a device has the same
units of each of the ``outer`` parts (:class:`~lightning_gpp.spmd.placement.Placement`)::

    outer=2, units=3, block=1, two devices with 2 and 1 units:   a b c | d e f
    device 0: a b d e        device 1: c f

Contract of :class:`Collectives` (``tests/distributed/collectives_contract.py``), which
:mod:`lightning_gpp.runtime.collectives` keeps over process groups: all ranks call the same methods
in the same order; shards may differ in size and be empty; results do not alias arguments that are
still the caller's; every wait gives up after its limit with an error that names ``purpose``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_gpp.spmd.placement import PARTIAL, R_SUMMED, Placement, units_per_device

Shape = tuple[int, ...]


class Collectives(Protocol):
    """The collectives that an interpreter needs."""

    rank: int
    num_ranks: int

    def all_gather(self, shard: Tensor, shapes: Sequence[Shape], *, purpose: str) -> list[Tensor]:
        """The tensors of all ranks, whose shapes are given by rank."""

    def all_to_all(
        self, parts: Sequence[Tensor], shapes: Sequence[Shape], *, purpose: str
    ) -> list[Tensor]:
        """Gives every rank its part; what came from each, whose shapes are given."""

    def begin_all_reduce(self, tensor: Tensor, *, purpose: str) -> Callable[[], Tensor]:
        """Begins a sum; calling what is returned waits for it. Others may come in between.

        The tensor is given away: the sum may take its memory.
        """

    def broadcast(
        self, tensor: Tensor | None, shape: Shape, dtype: torch.dtype, *, purpose: str
    ) -> Tensor:
        """Rank 0's tensor, which only rank 0 gives."""


@dataclass(frozen=True, slots=True)
class Shards:
    """How tensors are divided over the devices.

    Attributes:
        shares: of the devices.
    """

    shares: tuple[float, ...]

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.shares)

    def extent(
        self, whole: Sequence[int], placement: Placement, device: int
    ) -> tuple[int, int, int]:
        """The sharded dimension, and where in each outer part a device's begins, and its length."""
        assert placement.dim is not None and placement.units is not None
        block = placement.block(whole[placement.dim])
        units = units_per_device(placement.units, self.shares)
        return placement.dim, sum(units[:device]) * block, units[device] * block

    def shape(self, whole: Sequence[int], placement: Placement, device: int) -> Shape:
        """Sizes of what a device has of a tensor of sizes ``whole``."""
        if not placement.is_shard:
            return tuple(whole)
        dim, _, count = self.extent(whole, placement, device)
        return (*whole[:dim], placement.outer * count, *whole[dim + 1 :])

    def shapes(self, whole: Sequence[int], placement: Placement) -> list[Shape]:
        """The same for every device."""
        return [self.shape(whole, placement, device) for device in range(self.num_devices)]

    def cut(self, tensor: Tensor, placement: Placement, device: int) -> Tensor:
        """A device's part of a whole tensor; a view where possible.

        >>> import torch
        >>> from lightning_gpp.spmd.placement import shard
        >>> shards = Shards((0.6, 0.4))
        >>> shards.cut(torch.arange(6), shard(0, 3, outer=2), 0).tolist()
        [0, 1, 3, 4]
        """
        dim, start, count = self.extent(tensor.shape, placement, device)
        parts = _outer_parts(tensor, dim, placement.outer)
        return parts.narrow(dim + 1, start, count).flatten(dim, dim + 1)

    def cut_all(self, tensor: Tensor, placement: Placement) -> list[Tensor]:
        """Every device's part of a whole tensor."""
        return [self.cut(tensor, placement, device) for device in range(self.num_devices)]

    def join(self, parts: Sequence[Tensor], placement: Placement) -> Tensor:
        """The whole tensor of the parts of all devices."""
        dim = placement.dim
        assert dim is not None
        seen = [_outer_parts(part, dim, placement.outer) for part in parts]
        return torch.cat(seen, dim + 1).flatten(dim, dim + 1)

    def pad(self, part: Tensor, whole: Sequence[int], placement: Placement, device: int) -> Tensor:
        """A whole tensor that is zero outside of the part of a device."""
        padded = part.new_zeros(tuple(whole))
        dim, start, count = self.extent(whole, placement, device)
        rows = _outer_parts(padded, dim, placement.outer)
        rows.narrow(dim + 1, start, count).copy_(_outer_parts(part, dim, placement.outer))
        return padded


def _outer_parts(part: Tensor, dim: int, outer: int) -> Tensor:
    """The sharded dimension of a part as (outer, the units of each); a view where it can be."""
    shape = part.shape
    return part.reshape(*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :])


@dataclass(frozen=True, slots=True)
class Mover:
    """Moves tensors between the placements of a program, on one device.

    Sums are added in the order of the ranks, so they have the same bits everywhere.

    Attributes:
        group: this device and the others.
        shards: how tensors are divided.
        device: where its tensors are.
    """

    group: Collectives
    shards: Shards
    device: torch.device

    @property
    def rank(self) -> int:
        """Number of this device."""
        return self.group.rank

    def move(
        self,
        tensor: Tensor,
        whole: Shape,
        source: Placement | None,
        target: Placement | None,
        purpose: str,
    ) -> Tensor:
        """This device's part of a tensor in another placement; None is rank 0, which has all of it.

        Args:
            tensor: its part now; of what rank 0 has, elsewhere an empty tensor of the same type.
            whole: sizes of the whole tensor.
            source: the placement it has.
            target: the one it is to have.
            purpose: what for, for errors.
        """
        rank, shards, group = self.rank, self.shards, self.group
        if source is None:
            return self._from_root(tensor, whole, target or R_SUMMED, purpose)
        if target is None:
            return self._to_root(tensor, whole, source, purpose)
        if source == target or (source.is_replicated and target.is_replicated):
            return tensor
        if source.is_replicated and target.is_shard:
            return shards.cut(tensor, target, rank)
        if source.is_replicated:  # one device's summand is all of it
            return tensor if rank == 0 else torch.zeros_like(tensor)
        if source.is_shard and target == PARTIAL:
            return shards.pad(tensor, whole, source, rank)
        if source.is_shard and target.is_shard and source.dim != target.dim:
            parts = shards.cut_all(tensor, target)
            shapes = [shards.shape(shape, target, rank) for shape in shards.shapes(whole, source)]
            return shards.join(group.all_to_all(parts, shapes, purpose=purpose), source)
        if source.is_shard:
            shapes = shards.shapes(whole, source)
            joined = shards.join(group.all_gather(tensor, shapes, purpose=purpose), source)
            return shards.cut(joined, target, rank) if target.is_shard else joined
        if target.is_shard:  # gloo's reduce-scatter cannot be waited for with a limit
            parts = shards.cut_all(tensor, target)
            shapes = [tuple(parts[rank].shape)] * group.num_ranks
            return _sum(group.all_to_all(parts, shapes, purpose=purpose))
        return group.begin_all_reduce(tensor.clone(), purpose=purpose)()

    def _from_root(self, tensor: Tensor, whole: Shape, target: Placement, purpose: str) -> Tensor:
        """Nothing moves for summands: rank 0's is all of it, the others' are zeros."""
        is_root, count = self.rank == 0, self.group.num_ranks
        if target == PARTIAL:
            return tensor if is_root else tensor.new_zeros(whole)
        if not target.is_shard:
            own = tensor if is_root else None
            return self.group.broadcast(own, whole, tensor.dtype, purpose=purpose)
        parts = self.shards.cut_all(tensor, target) if is_root else [tensor] * count
        shapes = [self.shards.shape(whole, target, self.rank), *[(0,)] * (count - 1)]
        return self.group.all_to_all(parts, shapes, purpose=purpose)[0]

    def _to_root(self, tensor: Tensor, whole: Shape, source: Placement, purpose: str) -> Tensor:
        """On rank 0 its own, or the parts or summands of all; nothing elsewhere."""
        nothing, count = tensor.new_empty(0), self.group.num_ranks
        if source.is_replicated:
            return nothing if self.rank else tensor
        shapes = [(0,)] * count if self.rank else self.shards.shapes(whole, source)
        parts = [tensor, *[nothing] * (count - 1)]
        found = self.group.all_to_all(parts, shapes, purpose=purpose)
        if self.rank:
            return nothing
        return self.shards.join(found, source) if source.is_shard else _sum(found)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total
