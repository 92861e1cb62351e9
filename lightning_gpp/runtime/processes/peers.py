"""Communication between pipelines that train side by side.

Nothing inside of a pipeline knows of the others. What they share, they share between *peers*: the
first ranks of all pipelines, the second ones, and so on, which hold the same stages. Peers average
gradients and agree on what the pipelines must decide alike.

What they agree on goes over gloo. Gradients, buffers and weights go over a group of their own, of
the devices' backend where peers have different devices of one type (NCCL).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from lightning_gpp.runtime.processes.groups import (
    DeviceGroup,
    Operation,
    all_reduce,
    broadcast,
    pipelines_of,
)
from lightning_gpp.runtime.waits import TransportError, Waits

_BUCKET_BYTES = 25 * 2**20
"""Of gradients that are summed as one tensor, as in PyTorch's DDP."""

_MISSING = "the same rank of another pipeline did not come (do all pipelines have as many batches?)"
_CPU = torch.device("cpu")


class Peers:
    """What this rank shares with the same rank of the other pipelines.

    All peers call the same methods in the same order.

    Args:
        num_pipelines: number of pipelines.
        timeout_s: limit of every wait.
        device: of this rank.

    Attributes:
        pipeline: number of this rank's pipeline.
        num_pipelines: likewise.
        timeout_s: likewise.
        waits: of this rank.
    """

    def __init__(self, num_pipelines: int, timeout_s: float, device: torch.device = _CPU) -> None:
        pipelines = pipelines_of(num_pipelines)
        sets = list(zip(*pipelines, strict=True))
        self.pipeline = dist.get_rank() // len(pipelines[0])
        self.num_pipelines, self.timeout_s = num_pipelines, timeout_s
        self._device, self.waits = device, Waits()
        control = DeviceGroup.new(sets, _CPU, timeout_s, self.waits)
        data = DeviceGroup.new(sets, device, timeout_s, self.waits)
        assert control is not None and data is not None, "every rank has peers"
        self._control, self._data = control, data

    def close(self) -> None:
        """All peers after a run: they average nothing any more, but can still agree."""
        self._data.destroy()

    def leave(self) -> None:
        """After an error: what waits for other pipelines, or would, ends."""
        self.waits.abort(
            TransportError("after an error this rank is no longer joined with other pipelines")
        )

    def mean_(self, tensors: Sequence[Tensor], purpose: str) -> None:
        """Makes tensors, dense and alike on all peers, their mean over the pipelines.

        Args:
            tensors: of any floating-point types.
            purpose: of the sum, for errors.
        """
        for flat, unpack in self._buckets(tensors):
            self._do(self._data, flat, all_reduce, purpose)
            flat.div_(self.num_pipelines)
            unpack()

    def reduced(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, purpose: str) -> Tensor:
        """A tensor that is reduced over the peers, on its device."""
        options = dist.AllreduceOptions()
        options.reduceOp = op  # type: ignore[assignment]
        summed = tensor.detach().cpu().clone()
        self._agree(summed, lambda group, own: [group.allreduce([own], options)], purpose)
        return summed.to(tensor.device)

    def gather(self, obj: Any, purpose: str) -> list[Any]:
        """Every pipeline's object, on all peers."""
        return [self.share(obj, purpose, root=root) for root in range(self.num_pipelines)]

    def share(self, obj: Any, purpose: str, *, root: int = 0) -> Any:
        """One pipeline's object, on all peers."""
        packed = bytearray(pickle.dumps(obj)) if self.pipeline == root else bytearray()
        of_root = partial(broadcast, root=root)
        size = torch.tensor([len(packed)])
        self._agree(size, of_root, purpose)
        if self.pipeline == root:
            self._agree(torch.frombuffer(packed, dtype=torch.uint8), of_root, purpose)
            return obj
        data = torch.empty(int(size), dtype=torch.uint8)
        self._agree(data, of_root, purpose)
        return pickle.loads(data.numpy().tobytes())

    def spread(self, tensors: Sequence[Tensor], purpose: str) -> None:
        """Gives the values of the first pipeline's tensors to those of the others."""
        for flat, unpack in self._buckets(tensors):
            bits = flat.view(torch.uint8)
            self._do(self._data, bits, broadcast, purpose)
            if self.pipeline != 0:
                unpack()

    def _buckets(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Callable[[], object]]]:
        """Tensors of one type that travel as one, on the device, and what puts values back."""
        values = [tensor.detach() for tensor in tensors]
        for part in _take_tensors(values, _BUCKET_BYTES):  # type: ignore[no-untyped-call]
            flat = _flatten_dense_tensors(part)  # type: ignore[no-untyped-call]
            on_device: Tensor = flat.to(self._device)
            yield on_device, partial(_put_back, part, on_device)

    def meet(self, purpose: str) -> None:
        """Waits until all peers are here."""
        self._agree(torch.empty(0), lambda group, _: [group.barrier()], purpose)

    def _agree(self, tensor: Tensor, operation: Operation, purpose: str) -> None:
        self._do(self._control, tensor, operation, purpose)

    def _do(self, group: DeviceGroup, tensor: Tensor, operation: Operation, purpose: str) -> None:
        """Begins an operation together with the peers, and waits for its end."""
        group.begin(tensor, operation, _MISSING, in_place=True)(self.timeout_s, purpose)


def _put_back(tensors: Sequence[Tensor], flat: Tensor) -> None:
    values = _unflatten_dense_tensors(flat, tensors)  # type: ignore[no-untyped-call]
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
