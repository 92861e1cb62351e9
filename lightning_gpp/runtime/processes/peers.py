"""The same rank of every pipeline, where several pipelines train side by side.

Each pipeline is a world of its own to ``torch.distributed``, so that nothing inside of it knows of
the others. What they share, they share between *peers*: the first ranks of all pipelines, the
second ones, and so on, which hold the same stages. Peers average gradients and agree on what the
pipelines must decide alike.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_gpp.runtime.processes.work_waits import WorkWaits
from lightning_gpp.runtime.sums.sums import PendingSum, Ranks
from lightning_gpp.runtime.transport.transport import TransportError

_BUCKET_BYTES = 25 * 2**20
"""Of gradients that are summed as one tensor, as in PyTorch's DDP."""

_BUCKETS_BEGUN = 3
"""At once: gloo sums two, another one is packed or unpacked. A bucket is a copy of its tensors."""


class Peers:
    """What this rank shares with its peers. All of them call the same methods in the same order.

    Tensors travel through host memory. To a
    :class:`~lightning_gpp.runtime.sums.reduction.GradientReduction` they are
    :class:`~lightning_gpp.runtime.sums.sums.Sums` that give means; these have connections of their
    own, so that other calls may come while some pipelines have begun them and others have not.

    Args:
        store: of the peers alone.
        pipeline: number of this rank's pipeline.
        num_pipelines: how many there are.
        timeout_s: limit of every wait.

    Attributes:
        pipeline: likewise.
        num_pipelines: likewise.
        timeout_s: likewise.
    """

    def __init__(self, store: Store, pipeline: int, num_pipelines: int, timeout_s: float) -> None:
        self.pipeline, self.num_pipelines = pipeline, num_pipelines
        self.timeout_s = timeout_s
        timeout = timedelta(seconds=timeout_s)
        self._group: Any
        self._means_group: Any
        self._group, self._means_group = (
            dist.ProcessGroupGloo(PrefixStore(of, store), pipeline, num_pipelines, timeout)
            for of in ("calls", "means")
        )
        self._waits = WorkWaits()

    def __reduce__(self) -> Any:
        """Connections of a running process have no copy: a copy of peers is None."""
        return type(None), ()

    def leave(self) -> None:
        """Ends the connections after an error: the others see at once that this rank is gone."""
        self._group = self._means_group = None

    def abort(self, error: BaseException) -> None:
        """Makes this rank's wait, and every later one, raise ``error``."""
        self._waits.abort(error)

    def mean_(self, tensors: Sequence[Tensor], purpose: str) -> None:
        """Makes tensors, dense and alike on all peers, their mean over the pipelines.

        Args:
            tensors: of any floating-point types and devices.
            purpose: of the sum, for errors.
        """
        group = self._open(purpose, self._group)
        begun: deque[tuple[_Bucket, dist.Work]] = deque()

        def finish() -> None:
            bucket, work = begun.popleft()
            self.wait(work, purpose)
            bucket.flat.div_(self.num_pipelines)
            bucket.unpack()

        for part in _in_buckets(tensors):
            bucket = _Bucket(part)
            begun.append((bucket, group.allreduce([bucket.flat])))
            if len(begun) == _BUCKETS_BEGUN:
                finish()
        while begun:
            finish()

    def start(self, tensor: Tensor, ranks: Ranks) -> PendingSum:
        """Begins to make a contiguous tensor its mean, while this rank goes on."""
        summed = tensor.cpu()
        group = self._open("a mean over the pipelines", self._means_group)
        return _PendingMean(self, group.allreduce([summed]), tensor, summed)

    def reduced(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, purpose: str) -> Tensor:
        """A tensor that is reduced over the peers, on its device."""
        options = dist.AllreduceOptions()
        options.reduceOp = op  # type: ignore[assignment]
        summed = tensor.detach().cpu().clone()
        self.wait(self._open(purpose, self._group).allreduce([summed], options), purpose)
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
            bucket = _Bucket(part)
            self._broadcast(bucket.flat.view(torch.uint8), 0, purpose)
            if self.pipeline != 0:
                bucket.unpack()

    def meet(self, purpose: str) -> None:
        """Waits until all peers are here."""
        self.wait(self._open(purpose, self._group).barrier(), purpose)

    def _broadcast(self, tensor: Tensor, root: int, purpose: str) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        self.wait(self._open(purpose, self._group).broadcast([tensor], options), purpose)

    def _open(self, purpose: str, group: Any) -> Any:
        if group is None:
            raise TransportError(
                f"{purpose}: after an error this rank is no longer joined with other pipelines"
            )
        return group

    def wait(self, work: dist.Work, purpose: str) -> None:
        """Waits for what has begun.

        Raises:
            TransportError: it did not end in time, or a peer is lost.
        """
        late = TransportError(
            f"{purpose}: the same rank of another pipeline did not come within "
            f"{self.timeout_s:g} s; do all pipelines have as many batches?"
        )
        failed = f"{purpose}: lost the same rank of another pipeline"
        self._waits.wait(work, self.timeout_s, late=late, failed=failed)


@dataclass(frozen=True, slots=True)
class _PendingMean:
    peers: Peers
    work: dist.Work
    tensor: Tensor
    summed: Tensor

    def wait(self, timeout_s: float, purpose: str) -> None:
        self.peers.wait(self.work, purpose)
        self.summed.div_(self.peers.num_pipelines)
        if self.summed is not self.tensor:
            self.tensor.copy_(self.summed)


class _Bucket:
    """Tensors that travel as one.

    Args:
        tensors: of one type.

    Attributes:
        flat: their values, on the CPU.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self.flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu()

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
