"""Collectives between processes, by ``torch.distributed``: NCCL between GPUs, gloo otherwise.

Shards of unequal sizes are gathered by an exchange, which moves them as they are, so that it makes
no difference whether a plan pads or groups them. What is moved and not summed goes as bytes:
neither NCCL nor gloo know all types of numbers.

What is on a GPU goes through pinned host memory where the wire is gloo: there the host waits for
what a rank cannot go on without, but not for sums that have begun. With NCCL it waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpp.common.tensor_places import bits_of
from lightning_gpp.runtime.processes.groups import (
    DeviceGroup,
    all_reduce,
    broadcast,
)
from lightning_gpp.runtime.waits import Waits

_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""It has the second name before torch 2.13, where that one warns."""

_MISSING = "the collective did not end"


class ProcessCollectives:
    """The :class:`~lightning_gpp.spmd.run.moves.Collectives` of one process of the world.

    Args:
        timeout_s: limit of every wait.
        device: where this rank's tensors are.
        waits: of this rank.

    Attributes:
        rank: this rank.
        num_ranks: number of ranks.
    """

    def __init__(
        self,
        timeout_s: float,
        device: torch.device,
        waits: Waits | None = None,
    ) -> None:
        self.waits = waits or Waits()
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        group = DeviceGroup.new([range(self.num_ranks)], device, timeout_s, self.waits)
        assert group is not None, "all ranks are in it"
        self._group, self._device, self._timeout_s = group, device, timeout_s
        if not group.is_gloo:  # by sends and receives, which have connections of their own
            one = [torch.zeros(1, device=device)] * self.num_ranks
            ones = [(1,)] * self.num_ranks
            self.all_to_all(one, ones, purpose="connecting the ranks")

    def all_gather(
        self, shard: Tensor, shapes: Sequence[tuple[int, ...]], *, purpose: str
    ) -> list[Tensor]:
        """The tensors of all ranks."""
        sizes = {prod(shape) for shape in shapes}
        if len(sizes) > 1:
            return self.all_to_all([shard] * self.num_ranks, shapes, purpose=purpose)
        flat = bits_of(shard)
        out = self._group.buffer(self.num_ranks * flat.numel(), flat.dtype)

        def gather(group: Any, own: Tensor) -> list[Any]:
            return [_all_gather_single(out, own, group=group, async_op=True)]

        self._group.begin(flat, gather, _MISSING)(self._timeout_s, purpose)
        whole = out.to(self._device, non_blocking=True).view(shard.dtype)
        rows = whole.view(self.num_ranks, shard.numel())
        return [row.view(shape) for row, shape in zip(rows, shapes, strict=True)]

    def begin_all_reduce(self, tensor: Tensor, *, purpose: str) -> Callable[[], Tensor]:
        """Begins the sum over ranks, in the memory of what is given."""
        flat = tensor.detach().reshape(-1).contiguous()
        begun = self._group.begin(flat, all_reduce, _MISSING, in_place=True)

        def ended() -> Tensor:
            begun(self._timeout_s, purpose)
            return flat.view(tensor.shape)

        return ended

    def all_to_all(
        self,
        parts: Sequence[Tensor],
        shapes: Sequence[tuple[int, ...]],
        *,
        purpose: str,
    ) -> list[Tensor]:
        """Sends a tensor to every rank, and returns what each sent to this one."""
        dtype, sizes = parts[0].dtype, [prod(shape) for shape in shapes]
        sent = torch.cat([bits_of(part) for part in parts])
        num_bytes = [size * dtype.itemsize for size in sizes]
        out = self._group.buffer(sum(num_bytes), sent.dtype)
        splits = [part.nbytes for part in parts]

        def exchange(group: Any, own: Tensor) -> list[Any]:
            more = {"group": group, "async_op": True}
            return [dist.all_to_all_single(out, own, num_bytes, splits, **more)]

        self._group.begin(sent, exchange, _MISSING)(self._timeout_s, purpose)
        pieces = torch.split(out.to(self._device, non_blocking=True).view(dtype), sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def broadcast(
        self, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, *, purpose: str
    ) -> Tensor:
        """Rank 0's tensor."""
        if tensor is not None and self.rank == 0:
            flat = bits_of(tensor.clone())
        else:
            flat = self._group.buffer(prod(shape) * dtype.itemsize, torch.uint8)
        moved = self._group.begin(flat, broadcast, _MISSING)(self._timeout_s, purpose)
        return moved.to(self._device, non_blocking=True).view(dtype).reshape(shape)

    def close(self) -> None:
        """Gives the process group back; all ranks call it."""
        self._group.destroy()
