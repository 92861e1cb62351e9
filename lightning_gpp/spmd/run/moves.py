"""What moves when a tensor changes its placement; without autograd, on one device of all.

Of a tensor's values ``R`` and ``R=`` are alike. A gradient lies as the dual of its value. So the
backward of ``source -> target`` is the move ``target.dual -> source.dual``, and there is nothing
more to know: what is gathered forwards is reduced and scattered backwards, what is cut is padded,
what is summed is left as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gpp.spmd.placement import PARTIAL, Placement, shard
from lightning_gpp.spmd.program import Method
from lightning_gpp.spmd.run.collectives import Collectives, Shape
from lightning_gpp.spmd.run.shards import Shards


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
        is_grouped = method is Method.GROUPED
        rank, shards, group = self.rank, self.shards, self.collectives
        if source == target or (source.is_replicated and target.is_replicated):
            return tensor
        if source.is_replicated and target.is_shard:
            return shards.cut(tensor, target, rank)
        if source.is_replicated:  # one device's summand is all of it
            return tensor if rank == 0 else torch.zeros_like(tensor)
        if source.is_shard and target.is_replicated:
            shapes = shards.shapes(whole, source)
            parts = group.all_gather(tensor, shapes, is_grouped=is_grouped, purpose=purpose)
            return shards.join(parts, source)
        if source.is_shard and target.is_shard:
            return self._reshard(tensor, whole, source, target, purpose)
        if source.is_shard:
            return shards.pad(tensor, whole, source, rank)
        if target.is_shard:
            parts = shards.cut_all(tensor, target)
            return group.reduce_scatter(parts, is_grouped=is_grouped, purpose=purpose)
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
            found = group.all_to_all(parts, shapes, is_grouped=False, purpose=purpose)
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
        found = group.all_to_all(parts, shapes, is_grouped=False, purpose=purpose)
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
        own = self.collectives.reduce_scatter(parts, is_grouped=False, purpose=purpose)
        shapes = [tuple(part.shape) for part in parts]
        found = self.collectives.all_gather(own, shapes, is_grouped=False, purpose=purpose)
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
