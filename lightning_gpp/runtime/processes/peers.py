"""The same rank of every pipeline, where several pipelines train side by side.

Each pipeline is a world of its own to ``torch.distributed``, so that nothing inside of it knows of
the others. What they share, they share between *peers*: the first ranks of all pipelines, the
second ones, and so on, which hold the same stages. Peers average gradients and agree on what the
pipelines must decide alike.

What they agree on goes over gloo. Gradients, buffers and weights go over a group of their own, of
the devices' backend where peers have different devices of one type (NCCL). Its operations keep one
order, whichever pipelines have begun theirs early.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_gpp.runtime.processes.device_group import (
    DeviceGroup,
    PendingOperation,
    all_reduce,
    apart_from_world,
)
from lightning_gpp.runtime.processes.rank_devices import RankDevice, common_backend
from lightning_gpp.runtime.sums.sums import PendingSum, Ranks
from lightning_gpp.runtime.waits import TransportError, Waits

_BUCKET_BYTES = 25 * 2**20
"""Of gradients that are summed as one tensor, as in PyTorch's DDP."""

_CPU = torch.device("cpu")


class Peers:
    """What this rank shares with its peers. All of them call the same methods in the same order.

    To a :class:`~lightning_gpp.runtime.sums.reduction.GradientReduction` they are
    :class:`~lightning_gpp.runtime.sums.sums.Sums` that give means.

    Args:
        store: of the peers alone.
        pipeline: number of this rank's pipeline.
        num_pipelines: how many there are.
        timeout_s: limit of every wait.
        device: of this rank.

    Attributes:
        pipeline: likewise.
        num_pipelines: likewise.
        timeout_s: likewise.
        waits: of this rank.
    """

    def __init__(
        self,
        store: Store,
        pipeline: int,
        num_pipelines: int,
        timeout_s: float,
        device: torch.device = _CPU,
    ) -> None:
        self.pipeline, self.num_pipelines = pipeline, num_pipelines
        self.timeout_s = timeout_s
        self._device, self.waits = device, Waits()
        self._control: Any = self._made("gloo", PrefixStore("control", store))
        devices = self.gather(RankDevice.of(device), "collecting the devices of pipelines")
        backend = common_backend(devices)
        self._group: Any = self._made(backend, PrefixStore("data", store))
        is_gloo = backend == "gloo"
        self._data = DeviceGroup(self._group, device, self.waits, is_gloo=is_gloo)

    def _made(self, backend: str, store: Store) -> Any:
        own, number = self.pipeline, self.num_pipelines
        return apart_from_world(backend, store, own, number, self.timeout_s)

    def __reduce__(self) -> Any:
        """Connections of a running process have no copy: a copy of peers is None."""
        return type(None), ()

    def close(self) -> None:
        """All peers after a run: they average nothing any more, but can still agree."""
        self._data.close()
        if self._group is not None:
            self._group.shutdown()

    def leave(self) -> None:
        """Ends the connections after an error: the others see at once that this rank is gone."""
        self.waits.abort(
            TransportError("after an error this rank is no longer joined with other pipelines")
        )
        self._control = self._group = None
        self._data.forget()

    def mean_(self, tensors: Sequence[Tensor], purpose: str) -> None:
        """Makes tensors, dense and alike on all peers, their mean over the pipelines.

        Args:
            tensors: of any floating-point types.
            purpose: of the sum, for errors.
        """
        for part in _in_buckets(tensors):
            bucket = _Bucket(part, self._device)
            self.start(bucket.flat, ())(self.timeout_s, purpose)
            bucket.unpack()

    def start(self, tensor: Tensor, ranks: Ranks) -> PendingSum:
        """Begins to make a contiguous tensor its mean, while this rank goes on."""
        begun = self._data.begin(tensor, all_reduce)

        def wait(timeout_s: float, purpose: str) -> None:
            self.wait_in_place(begun, purpose)
            tensor.div_(self.num_pipelines)

        return wait

    def reduced(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, purpose: str) -> Tensor:
        """A tensor that is reduced over the peers, on its device."""
        options = dist.AllreduceOptions()
        options.reduceOp = op  # type: ignore[assignment]
        summed = tensor.detach().cpu().clone()
        self.waits.check()
        self._wait(self._control.allreduce([summed], options), purpose)
        return summed.to(tensor.device)

    def gather(self, obj: Any, purpose: str) -> list[Any]:
        """Every pipeline's object, on all peers."""
        return [self.share(obj, purpose, root=root) for root in range(self.num_pipelines)]

    def share(self, obj: Any, purpose: str, *, root: int = 0) -> Any:
        """One pipeline's object, on all peers."""
        is_mine = self.pipeline == root
        packed = bytearray(pickle.dumps(obj)) if is_mine else bytearray()
        size = torch.tensor([len(packed)])
        self._broadcast(size, root, purpose)
        data = torch.empty(int(size), dtype=torch.uint8)
        if is_mine:
            data = torch.frombuffer(packed, dtype=torch.uint8)
        self._broadcast(data, root, purpose)
        return obj if is_mine else pickle.loads(data.numpy().tobytes())

    def spread(self, tensors: Sequence[Tensor], purpose: str) -> None:
        """Gives the values of the first pipeline's tensors to those of the others."""
        for part in _in_buckets(tensors):
            bucket = _Bucket(part, self._device)
            bits = bucket.flat.view(torch.uint8)
            self.wait_in_place(self._data.begin(bits, _broadcast), purpose)
            if self.pipeline != 0:
                bucket.unpack()

    def meet(self, purpose: str) -> None:
        """Waits until all peers are here."""
        self.waits.check()
        self._wait(self._control.barrier(), purpose)

    def _broadcast(self, tensor: Tensor, root: int, purpose: str) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        self.waits.check()
        self._wait(self._control.broadcast([tensor], options), purpose)

    def _wait(self, work: dist.Work, purpose: str) -> None:
        begun: Future[Sequence[dist.Work]] = Future()
        begun.set_result([work])
        nothing = torch.empty(0)
        self.wait_in_place(PendingOperation(self.waits, begun, nothing, nothing, True), purpose)

    def wait_in_place(self, begun: PendingOperation, purpose: str) -> None:
        """Waits until a tensor holds what peers have made of it.

        Raises:
            TransportError: it did not end in time, or a peer is lost.
        """
        late = (
            f"{purpose}: the same rank of another pipeline did not come within "
            f"{self.timeout_s:g} s; do all pipelines have as many batches?"
        )
        failed = f"{purpose}: lost the same rank of another pipeline"
        begun.wait_in_place(self.timeout_s, late=late, failed=failed)


def _broadcast(group: Any, tensor: Tensor) -> Sequence[dist.Work]:
    """The first pipeline's tensor."""
    return [group.broadcast([tensor], dist.BroadcastOptions())]


class _Bucket:
    """Tensors that travel as one.

    Args:
        tensors: of one type.
        device: of this rank; they may be elsewhere.

    Attributes:
        flat: their values, on the device.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._tensors = tensors
        self.flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).to(device)

    def unpack(self) -> None:
        """Puts the values back."""
        parts = torch.split(self.flat, [tensor.numel() for tensor in self._tensors])
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor.detach().copy_(part.view_as(tensor))


def _in_buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors of one type and device side by side, none split."""
    buckets: list[list[Tensor]] = []
    sizes: dict[Any, int] = {}
    last: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        key = tensor.dtype, tensor.device
        if key not in last or sizes[key] >= _BUCKET_BYTES:
            last[key], sizes[key] = [], 0
            buckets.append(last[key])
        last[key].append(tensor)
        sizes[key] += tensor.nbytes
    return buckets
