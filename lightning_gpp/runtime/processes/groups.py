"""Process groups for tensors on any device, without waits of the host.

The backend of the device itself (NCCL) queues an operation on a stream of its own, behind what
makes its tensor; who needs the result makes the stream wait that computes. gloo moves memory of
CPUs: what is on another device is copied to pinned memory beside compute, and a thread begins the
operation when the copy is complete. Either way operations run in the order in which they begin.

Every rank sees its own device only, so they tell each other first: a rank that chose its backend by
itself would speak NCCL to one that listens with gloo.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpp.common.torch_device import device_uuid, is_accelerator, set_current, synchronize
from lightning_gpp.runtime.device_copies import DeviceCopies
from lightning_gpp.runtime.waits import (
    Background,
    TransportError,
    Waits,
    finish,
    reason,
    start_thread,
    too_late,
)


@dataclass(frozen=True, slots=True)
class RankDevice:
    """The device of one rank.

    Attributes:
        type: as torch has it (``"cpu"``, ``"cuda"``, ``"xpu"``).
        identity: tells it from all other devices of the job; the CPUs of a host have one.
    """

    type: str
    identity: str

    @classmethod
    def of(cls, device: torch.device) -> RankDevice:
        """The device of this rank. Processes may number GPUs differently, so these go by UUID."""
        return cls(device.type, device_uuid(device) or f"{host_identity()} {device}")


def of_every_rank(obj: Any) -> list[Any]:
    """All ranks of the world, together: the object of every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, obj)
    return found


def device_backend(device: torch.device) -> str:
    """The backend of ``torch.distributed`` for tensors of a device; gloo is for CPUs."""
    return dist.get_default_backend_for_device(device) if is_accelerator(device) else "gloo"


def common_backend(devices: Sequence[RankDevice]) -> str:
    """By which backend some ranks exchange tensors of their devices; the same on all of them.

    GPUs talk by their own; NCCL refuses two ranks on one GPU. Whatever is mixed uses gloo, which
    moves memory of CPUs only: what is on a GPU is staged through it.

    >>> cpu, gpu, other = RankDevice("cpu", "a"), RankDevice("cuda", "b"), RankDevice("cuda", "c")
    >>> [common_backend(ranks) for ranks in ((cpu, cpu), (gpu, gpu), (cpu, gpu))]
    ['gloo', 'gloo', 'gloo']
    """
    types = {device.type for device in devices}
    if len(types) > 1 or len({device.identity for device in devices}) < len(devices):
        return "gloo"
    return device_backend(torch.device(types.pop()))


@cache
def host_identity() -> str:
    """Identifies this host, its network namespace and its process namespace."""
    parts = [socket.gethostname()]
    for path in ("sys/kernel/random/boot_id", "self/ns/net", "self/ns/pid"):
        with contextlib.suppress(OSError):
            place = Path("/proc", path)
            parts.append(str(place.readlink()) if place.is_symlink() else place.read_text().strip())
    return " ".join(parts)


def pipelines_of(num_pipelines: int) -> list[range]:
    """The ranks of each of some pipelines side by side; they follow each other."""
    size = dist.get_world_size() // num_pipelines
    return [range(index * size, (index + 1) * size) for index in range(num_pipelines)]


def own_group(sets: Iterable[Sequence[int]], backend: str, timeout: timedelta) -> Any:
    """All ranks of the world: makes a process group of each set; the one that this rank is in."""
    groups = [list(ranks) for ranks in sets]
    return dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        groups, timeout=timeout, backend=backend
    )[0]


def meet() -> None:
    """Waits for all ranks; torch's own barrier would queue a kernel on GPUs and wait for it."""
    dist.all_reduce(torch.zeros(1, device="cpu"))


log = logging.getLogger(__name__)

Operation = Callable[[Any, Tensor], Sequence[dist.Work]]
"""Begins what a process group does with a tensor."""

Pending = Callable[[float, str], Tensor]
"""Waits for an operation that has begun: gets the seconds after which the host gives up (a stream
does at the group's limit), and what for. Returns what the group reads and writes: the tensor that
was given, or its copy in host memory.

Raises:
    TransportError: it did not end in time, or it failed, as another rank has gone.
    BaseException: the error that ends all waits.
"""

_CLOSE_S = 30.0


class DeviceGroup:
    """A process group of one type of device.

    All of its ranks create it, and start operations, in one order.

    Args:
        group: of ``torch.distributed``, whose backend is gloo or the device's own.
        device: where this rank's tensors are.
        waits: of this rank.
        is_gloo: which of them it is.

    Attributes:
        is_gloo: likewise.
    """

    def __init__(self, group: Any, device: torch.device, waits: Waits, *, is_gloo: bool) -> None:
        self._group, self._device, self._waits, self.is_gloo = group, device, waits, is_gloo
        self._copies = self._beginner = None
        if is_gloo and is_accelerator(device):
            self._copies = DeviceCopies(device)
            self._beginner = Background("begin", partial(set_current, device))
            waits.on_abort.append(partial(self._beginner.close, 0.0))
        if not is_gloo:
            waits.on_abort.append(partial(abort_group, group))
            self._connect()

    @classmethod
    def new(
        cls,
        sets: Sequence[Sequence[int]],
        device: torch.device,
        timeout_s: float,
        waits: Waits,
    ) -> DeviceGroup | None:
        """All ranks of the world: the group of this rank, if it is in any.

        Args:
            sets: ranks of each group; none is in two of them.
            device: where this rank's tensors are.
            timeout_s: limit of every operation.
            waits: of this rank.
        """
        devices, found = of_every_rank(RankDevice.of(device)), None
        for ranks in sets:
            backend = common_backend([devices[rank] for rank in ranks])
            group = own_group([ranks], backend, timedelta(seconds=timeout_s))
            if dist.get_rank() in ranks:
                found = cls(group, device, waits, is_gloo=backend == "gloo")
        return found

    def destroy(self) -> None:
        """All of its ranks: waits for what has begun, and gives the group back."""
        if self._beginner is not None:
            self._beginner.close(_CLOSE_S)
        if not self.is_gloo:
            torch.accelerator.synchronize(self._device)
        dist.destroy_process_group(self._group)

    def _connect(self) -> None:
        """Makes the connections, in an order that all ranks keep, while nothing else is queued.

        At the first operation, the host would wait for the others, whose kernels may by then wait
        for something that this rank has yet to queue.
        """
        for work in all_reduce(self._group, torch.zeros(1, device=self._device)):
            work.wait()
        synchronize(self._device)

    def begin(
        self, tensor: Tensor, operation: Operation, missing: str, *, in_place: bool = False
    ) -> Pending:
        """Begins an operation on a tensor of the device.

        Args:
            tensor: contiguous, or a :meth:`buffer`; nobody else uses it before the end.
            operation: gets it where the group can read and write it.
            missing: what did not happen where it fails, for errors.
            in_place: whether the tensor, too, is to hold the result.
        """
        self._waits.check()
        moved, copied = tensor, None
        if self._copies is not None and tensor.device.type == self._device.type:
            (moved,), copied = self._copies.to_host([tensor])

        def works() -> Sequence[dist.Work]:
            if copied is not None:
                copied.synchronize()
            return operation(self._group, moved)

        begun = self._beginner.submit(works) if self._beginner else finish(Future(), works)

        def wait(timeout_s: float, purpose: str) -> Tensor:
            late = too_late(purpose, missing, timeout_s)
            self._waits.done(begun, timeout_s, late)
            try:
                for work in begun.result():
                    if self.is_gloo:  # the host waits for it, else the stream that is current
                        self._waits.done(work.get_future(), timeout_s, late)
                    work.wait()
            except TransportError:
                raise
            except RuntimeError as error:
                self._waits.check()
                raise TransportError(f"{purpose}: {missing} ({reason(error)})") from error
            if in_place and moved is not tensor:
                tensor.copy_(moved, non_blocking=True)
            return moved

        return wait

    def buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        """Memory that the group can write, pinned where it is of the host."""
        if self._copies is not None:
            return self._copies.buffer((size,), dtype)
        return torch.empty(size, dtype=dtype, device=self._device)


def all_reduce(group: Any, tensor: Tensor) -> Sequence[dist.Work]:
    """An :data:`Operation`: the sum over the ranks of a group, in place."""
    return [group.allreduce([tensor])]


def broadcast(group: Any, tensor: Tensor, root: int = 0) -> Sequence[dist.Work]:
    """An :data:`Operation`: the tensor of one rank of a group, in the place of the others'."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    return [group.broadcast([tensor], options)]


def abort_group(group: Any) -> None:
    """Ends what waits on a device for ranks that are gone; nobody waits for that here.

    An abort waits for the kernels of its group and, as it frees memory, for those of others: every
    group has a thread for it.
    """
    start_thread("abort", _abort, group)


def _abort(group: Any) -> None:
    try:
        group.abort()
    except RuntimeError as error:
        log.warning("what waits on a device could not be aborted: %s", error)
