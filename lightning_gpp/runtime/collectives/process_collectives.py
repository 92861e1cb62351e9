"""Collectives among processes, by ``torch.distributed``: NCCL among GPUs, gloo otherwise.

gloo knows no shards of unequal sizes. Padded, a collective moves every shard at the size of the
largest; grouped, it is one broadcast or reduction per rank, begun together and waited for
together. gloo's reduce-scatter cannot be waited for with a limit (its work has no future), and
adds in an order of its own: here the parts are exchanged, and each rank adds up its own in the
order of the ranks. That moves the bytes of a reduce-scatter.

What is on a GPU goes through host memory where the wire is gloo. (NCCL has run none of this yet.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpp.runtime.processes.rank_devices import Wire, choose_wire, gather_rank_devices
from lightning_gpp.runtime.processes.work_waits import WorkWaits
from lightning_gpp.runtime.transport.transport import TransportError

_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""It has the second name before torch 2.13, where that one warns."""


class ProcessCollectives:
    """The :class:`~lightning_gpp.spmd.run.collectives.Collectives` of one process of the world.

    Args:
        timeout_s: limit of every wait.
        device: where this rank's tensors are.

    Attributes:
        rank: this rank.
        num_ranks: number of ranks.
    """

    def __init__(self, timeout_s: float, device: torch.device) -> None:
        is_nccl = choose_wire(gather_rank_devices(device)) is Wire.NCCL
        self._group = dist.new_group(
            timeout=timedelta(seconds=timeout_s), backend="nccl" if is_nccl else "gloo"
        )
        self._device, self._timeout_s = device, timeout_s
        self._is_staged = not is_nccl and device.type not in ("cpu", "meta")
        self._waits_on_host = self._is_staged or device.type == "cpu"
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._waits = WorkWaits()

    def all_gather(
        self,
        shard: Tensor,
        shapes: Sequence[tuple[int, ...]],
        *,
        is_grouped: bool,
        purpose: str,
    ) -> list[Tensor]:
        """The tensors of all ranks."""
        sizes = [prod(shape) for shape in shapes]
        flat = self._sent(shard)
        if is_grouped:
            found = [flat if r == self.rank else flat.new_empty(n) for r, n in enumerate(sizes)]
            self._do([self._broadcast(each, r) for r, each in enumerate(found)], purpose)
        else:
            longest = max(sizes)
            out = flat.new_empty(self.num_ranks * longest)
            padded = _padded(flat, longest)
            self._do([lambda: self._all_gather(out, padded)], purpose)
            rows = out.view(self.num_ranks, longest)
            found = [row[:size] for row, size in zip(rows, sizes, strict=True)]
        return [self._received(each, shape) for each, shape in zip(found, shapes, strict=True)]

    def reduce_scatter(self, parts: Sequence[Tensor], *, is_grouped: bool, purpose: str) -> Tensor:
        """The sum over ranks of one part."""
        shape = tuple(parts[self.rank].shape)
        shapes = [shape] * self.num_ranks
        found = self.all_to_all(parts, shapes, is_grouped=is_grouped, purpose=purpose)
        return _sum(found)

    def all_reduce(self, tensor: Tensor, *, purpose: str) -> Tensor:
        """The sum over ranks."""
        return self.begin_all_reduce(tensor.clone(), purpose=purpose)()

    def begin_all_reduce(self, tensor: Tensor, *, purpose: str) -> Callable[[], Tensor]:
        """Begins the sum over ranks, in the memory of what is given."""
        flat = self._sent(tensor)
        end = self._begin(
            [lambda: dist.all_reduce(flat, group=self._group, async_op=True)], purpose
        )

        def ended() -> Tensor:
            end()
            return self._received(flat, tuple(tensor.shape))

        return ended

    def all_to_all(
        self,
        parts: Sequence[Tensor],
        shapes: Sequence[tuple[int, ...]],
        *,
        is_grouped: bool,
        purpose: str,
    ) -> list[Tensor]:
        """What came from each rank.

        Unequal parts go as they are: ``torch.distributed`` exchanges them without padding, so
        ``is_grouped`` makes no difference.
        """
        flat = [self._sent(part) for part in parts]
        sizes = [prod(shape) for shape in shapes]
        sent, out = torch.cat(flat), flat[0].new_empty(sum(sizes))
        splits = [part.numel() for part in flat]

        def exchange() -> dist.Work | None:
            work: dist.Work | None = dist.all_to_all_single(
                out, sent, sizes, splits, group=self._group, async_op=True
            )
            return work

        self._do([exchange], purpose)
        pieces = torch.split(out, sizes)
        return [self._received(each, shape) for each, shape in zip(pieces, shapes, strict=True)]

    def broadcast(
        self, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, *, purpose: str
    ) -> Tensor:
        """Rank 0's tensor."""
        flat = self._given(tensor, prod(shape), dtype)
        self._do([self._broadcast(flat, 0)], purpose)
        return self._received(flat, shape)

    def scatter(
        self,
        parts: Sequence[Tensor] | None,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        *,
        purpose: str,
    ) -> Tensor:
        """One of rank 0's parts: an exchange in which only rank 0 sends."""
        host = self._host()
        nothing = torch.empty(0, dtype=dtype, device=host)
        given = parts if parts is not None and self.rank == 0 else [nothing] * self.num_ranks
        own = shapes[self.rank]
        from_each = [own, *[(0,)] * (self.num_ranks - 1)]
        return self.all_to_all(given, from_each, is_grouped=False, purpose=purpose)[0]

    def gather(
        self, shard: Tensor, shapes: Sequence[tuple[int, ...]], *, purpose: str
    ) -> list[Tensor] | None:
        """On rank 0 the tensors of all ranks: an exchange in which only rank 0 receives."""
        nothing = shard.new_empty(0)
        given = [shard, *[nothing] * (self.num_ranks - 1)]
        from_each = shapes if self.rank == 0 else [(0,)] * self.num_ranks
        found = self.all_to_all(given, from_each, is_grouped=False, purpose=purpose)
        return found if self.rank == 0 else None

    def reduce(self, tensor: Tensor, *, purpose: str) -> Tensor | None:
        """On rank 0 the sum over ranks."""
        shapes = [tuple(tensor.shape)] * self.num_ranks
        found = self.gather(tensor, shapes, purpose=purpose)
        return None if found is None else _sum(found)

    def abort(self, error: BaseException) -> None:
        """Makes every waiting and every later call raise ``error``."""
        self._waits.abort(error)

    def close(self) -> None:
        """Gives the process group back; all ranks call it."""
        dist.destroy_process_group(self._group)

    # On the wire -----------------------------------------------------------------------------

    def _host(self) -> torch.device:
        return torch.device("cpu") if self._is_staged else self._device

    def _sent(self, tensor: Tensor, *, copies: bool = False) -> Tensor:
        # A column of a matrix is flat with a stride, which a broadcast of gloo does not look at.
        flat = tensor.detach().reshape(-1).contiguous()
        moved = flat.to(self._host())
        return moved.clone() if copies and moved.data_ptr() == tensor.data_ptr() else moved

    def _given(self, tensor: Tensor | None, size: int, dtype: torch.dtype) -> Tensor:
        if tensor is not None and self.rank == 0:
            return self._sent(tensor, copies=True)
        return torch.empty(size, dtype=dtype, device=self._host())

    def _received(self, flat: Tensor, shape: tuple[int, ...]) -> Tensor:
        return flat.to(self._device).reshape(shape)

    def _broadcast(self, flat: Tensor, root: int) -> Callable[[], dist.Work | None]:
        return lambda: dist.broadcast(flat, root, group=self._group, async_op=True)

    def _all_gather(self, out: Tensor, flat: Tensor) -> dist.Work | None:
        work: dist.Work | None = _all_gather_single(out, flat, group=self._group, async_op=True)
        return work

    def _do(self, begins: Sequence[Callable[[], dist.Work | None]], purpose: str) -> None:
        """Begins operations together and waits for all of them.

        Raises:
            TransportError: they do not end in time, or another rank has gone.
        """
        self._begin(begins, purpose)()

    def _begin(
        self, begins: Sequence[Callable[[], dist.Work | None]], purpose: str
    ) -> Callable[[], None]:
        """Begins operations together; calling what is returned waits for all of them."""
        self._waits.check()
        failed = f"{purpose}: the collective failed"
        try:
            works = [work for begin in begins if (work := begin()) is not None]
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise TransportError(f"{failed} ({reason})") from error

        def end() -> None:
            late = late_collective(purpose, (), self._timeout_s)
            for work in works:
                self._waits.wait(
                    work, self._timeout_s, late=late, failed=failed, is_on_host=self._waits_on_host
                )

        return end


def _padded(flat: Tensor, size: int) -> Tensor:
    if flat.numel() == size:
        return flat
    padded = flat.new_zeros(size)
    padded[: flat.numel()] = flat
    return padded


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def late_collective(purpose: str, missing: Sequence[int], timeout_s: float) -> TransportError:
    """The error of a collective that took too long."""
    ranks = f" with rank {', '.join(map(str, missing))}" if missing else ""
    return TransportError(
        f"{purpose}: the collective{ranks} did not end within {timeout_s:g} s; "
        "raise `timeout` if the work before it can take longer"
    )
