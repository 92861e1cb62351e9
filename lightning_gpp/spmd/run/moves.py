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

from lightning_gpp.spmd.placement import PARTIAL, Placement, shard, units_per_device
from lightning_gpp.spmd.program import Method
from lightning_gpp.spmd.run.collectives import Collectives, Shape


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
        dim, start, count = self._seen(tensor.shape, placement, device)
        parts = _outer_parts(tensor, dim, placement.outer)
        return parts.narrow(dim + 1, start, count).flatten(dim, dim + 1)

    def cut_all(self, tensor: Tensor, placement: Placement) -> list[Tensor]:
        """What every device has of a whole tensor."""
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
        dim, start, count = self._seen(whole, placement, device)
        rows = _outer_parts(padded, dim, placement.outer)
        rows.narrow(dim + 1, start, count).copy_(_outer_parts(part, dim, placement.outer))
        return padded

    def _seen(
        self, whole: Sequence[int], placement: Placement, device: int
    ) -> tuple[int, int, int]:
        """The sharded dimension, and where in each outer part a device's begins, and its length."""
        assert placement.dim is not None
        block = placement.block(whole[placement.dim])
        start, count = self.start(placement, device), self.units(placement)[device]
        return placement.dim, start * block, count * block


def _outer_parts(part: Tensor, dim: int, outer: int) -> Tensor:
    """The sharded dimension of a part as (outer, the units of each); a view where it can be."""
    shape = part.shape
    return part.reshape(*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :])


@dataclass(frozen=True, slots=True)
class Mover:
    """Moves tensors between the placements of a program, on one device.

    Attributes:
        collectives: of this device with the others.
        shards: how tensors are dealt.
        device: where its tensors are.
    """

    collectives: Collectives
    shards: Shards
    device: torch.device

    @property
    def rank(self) -> int:
        """Number of this device."""
        return self.collectives.rank

    def move(
        self,
        tensor: Tensor,
        whole: Shape,
        source: Placement,
        target: Placement,
        method: Method,
        purpose: str,
    ) -> Tensor:
        """This device's part of a tensor in another placement.

        Args:
            tensor: its part now.
            whole: sizes of the whole tensor.
            source: the placement it has.
            target: the one it is to have.
            method: how.
            purpose: what for, for errors.
        """
        rank, shards, group = self.rank, self.shards, self.collectives
        if source == target or (source.is_replicated and target.is_replicated):
            return tensor
        if source.is_replicated and target.is_shard:
            return shards.cut(tensor, target, rank)
        if source.is_replicated:  # one device's summand is all of it
            return tensor if rank == 0 else torch.zeros_like(tensor)
        if source.is_shard and target.is_replicated:
            shapes = shards.shapes(whole, source)
            parts = group.all_gather(tensor, shapes, purpose=purpose)
            return shards.join(parts, source)
        if source.is_shard and target.is_shard:
            return self._reshard(tensor, whole, source, target, purpose)
        if source.is_shard:
            return shards.pad(tensor, whole, source, rank)
        if target.is_shard:
            parts = shards.cut_all(tensor, target)
            return group.reduce_scatter(parts, purpose=purpose)
        if method is Method.SCATTER_GATHER:
            return self._in_two(tensor, purpose)
        return group.all_reduce(tensor, purpose=purpose)

    def _reshard(
        self, tensor: Tensor, whole: Shape, source: Placement, target: Placement, purpose: str
    ) -> Tensor:
        """From one shard to another: of one dimension dealt otherwise, or of two dimensions."""
        shards, rank, group = self.shards, self.rank, self.collectives
        if source.dim != target.dim:
            parts = shards.cut_all(tensor, target)
            shapes = [shards.shape(shape, target, rank) for shape in shards.shapes(whole, source)]
            found = group.all_to_all(parts, shapes, purpose=purpose)
            return shards.join(found, source)
        dim = source.dim
        assert dim is not None
        here, there = (self._rows(placement, whole[dim]) for placement in (source, target))

        def chosen(tensor: Tensor, place: dict[int, int], rows: list[int]) -> Tensor:
            index = [place[row] for row in rows if row in place]
            return tensor.index_select(
                dim, torch.tensor(index, dtype=torch.int64).to(tensor.device)
            )

        own = {row: place for place, row in enumerate(here[rank])}
        parts = [chosen(tensor, own, rows) for rows in there]
        wanted = set(there[rank])
        from_each = [[row for row in rows if row in wanted] for rows in here]
        shapes = [(*whole[:dim], len(rows), *whole[dim + 1 :]) for rows in from_each]
        found = group.all_to_all(parts, shapes, purpose=purpose)
        place = {row: at for at, row in enumerate(row for rows in from_each for row in rows)}
        return chosen(torch.cat(found, dim), place, there[rank])

    def _rows(self, placement: Placement, length: int) -> list[list[int]]:
        """Which elements of a dimension every device has, in its order."""
        in_front = shard(0, placement.units or 0, outer=placement.outer)
        return [part.tolist() for part in self.shards.cut_all(torch.arange(length), in_front)]

    def _in_two(self, tensor: Tensor, purpose: str) -> Tensor:
        """A sum as reduce-scatter and all-gather, every device adding up an equal part."""
        flat = tensor.reshape(-1)
        parts = list(torch.tensor_split(flat, self.collectives.num_ranks))
        own = self.collectives.reduce_scatter(parts, purpose=purpose)
        shapes = [tuple(part.shape) for part in parts]
        found = self.collectives.all_gather(own, shapes, purpose=purpose)
        return torch.cat(found).reshape(tensor.shape)

    def from_root(
        self,
        tensor: Tensor | None,
        whole: Shape,
        dtype: torch.dtype,
        target: Placement,
        purpose: str,
    ) -> Tensor:
        """This device's part of a tensor that rank 0 gives whole: a broadcast or a scatter.

        Nothing moves for summands: rank 0's is all of it, the others' are zeros.
        """
        given = None if tensor is None else tensor.to(self.device)
        if target == PARTIAL:
            return torch.zeros(whole, dtype=dtype, device=self.device) if given is None else given
        if not target.is_shard:
            return self.collectives.broadcast(given, whole, dtype, purpose=purpose)
        parts = None if given is None else self.shards.cut_all(given, target)
        shapes = self.shards.shapes(whole, target)
        return self.collectives.scatter(parts, shapes, dtype, purpose=purpose)

    def to_root(
        self, tensor: Tensor, whole: Shape, source: Placement, purpose: str
    ) -> Tensor | None:
        """On rank 0 the whole tensor, None elsewhere: its own, a gather or a sum."""
        if source.is_shard:
            shapes = self.shards.shapes(whole, source)
            parts = self.collectives.gather(tensor, shapes, purpose=purpose)
            return None if parts is None else self.shards.join(parts, source)
        if source == PARTIAL:
            return self.collectives.reduce(tensor, purpose=purpose)
        return tensor if self.rank == 0 else None
