"""A process group for the tensors of a device: the host waits for neither of them.

The backend of the device itself (NCCL) queues an operation on a stream of its own, behind what
makes its tensor; who needs the result makes the stream wait that computes. gloo moves memory of
CPUs: what is on another device is copied to pinned memory beside compute, and a thread begins the
operation when the copy is complete. Either way operations run in the order in which they begin.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from lightning_gpp.common.torch_device import synchronize
from lightning_gpp.runtime.processes.rank_devices import (
    RankDevice,
    Wire,
    choose_wire,
    device_backend,
)
from lightning_gpp.runtime.processes.work_waits import WorkWaits
from lightning_gpp.runtime.transport.device_copies import DeviceCopies
from lightning_gpp.runtime.transport.transport import TransportError

log = logging.getLogger(__name__)

Operation = Callable[[Any, Tensor], Sequence[dist.Work]]
"""Begins what a process group does with a tensor."""

_HOSTS = ("cpu", "meta")


class DeviceGroup:
    """What a rank has of a process group; all of its ranks make it, and begin operations, alike.

    Args:
        group: of ``torch.distributed``, whose backend is gloo or the device's own.
        device: where this rank's tensors are.
        is_gloo: which of them it is.
        copies: of the device, by default where they are needed.
    """

    def __init__(
        self,
        group: Any,
        device: torch.device,
        *,
        is_gloo: bool,
        copies: DeviceCopies | None = None,
    ) -> None:
        if copies is None and is_gloo and device.type not in _HOSTS:
            copies = DeviceCopies(device)
        self._group, self._device, self._copies = group, device, copies
        self._is_gloo = is_gloo
        self._waits = WorkWaits()
        self._beginner = None if copies is None else _thread_on(device)
        if not is_gloo:
            self._connect()

    def _connect(self) -> None:
        """Makes the connections, in an order that all ranks keep, while nothing else is queued.

        At the first operation, the host would wait for the others, whose kernels may by then wait
        for something that this rank has yet to queue.
        """
        for work in all_reduce(self._group, torch.zeros(1, device=self._device)):
            work.wait()
        synchronize(self._device)

    def begin(self, tensor: Tensor, operation: Operation) -> PendingOperation:
        """Begins an operation on a tensor of the device.

        Args:
            tensor: contiguous, or a :meth:`buffer`; nobody else uses it before the end.
            operation: gets it where the group can read and write it.
        """
        self._waits.check()
        moved, copied = tensor, None
        if self._copies is not None and tensor.device.type == self._device.type:
            (moved,), copied = self._copies.to_host([tensor])

        def works() -> Sequence[dist.Work]:
            if copied is not None:
                copied.synchronize()
            return operation(self._group, moved)

        begun = _done(works) if self._beginner is None else self._beginner.submit(works)
        return PendingOperation(self._waits, begun, tensor, moved, self._is_gloo)

    def buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        """Memory that the group can write; :meth:`on_device` brings it to the device."""
        if self._copies is not None:
            return self._copies.buffer((size,), dtype)
        return torch.empty(size, dtype=dtype, device=self._device)

    def on_device(self, tensor: Tensor) -> Tensor:
        """What the group has moved, on the device."""
        return tensor.to(self._device, non_blocking=True)  # from pinned memory, or as it is

    def abort(self, error: BaseException) -> None:
        """Makes every wait, and every later call, raise ``error``; ends what waits on the device.

        Any thread may call it, and does not wait.
        """
        self._waits.abort(error)
        if self._beginner is not None:
            self._beginner.shutdown(wait=False, cancel_futures=True)
        if not self._is_gloo:
            abort_group(self._group)

    def close(self) -> None:
        """Waits for what has begun; nothing begins any more. The group is its maker's to end."""
        if self._beginner is not None:
            self._beginner.shutdown()
        if not self._is_gloo:
            torch.accelerator.synchronize(self._device)


@dataclass(frozen=True, slots=True)
class PendingOperation:
    """An operation that has begun.

    Attributes:
        waits: of this rank.
        works: of torch, once they have begun, too.
        tensor: that was given.
        moved: what the group reads and writes: the same, or its copy in host memory.
        is_on_host: whether the host waits for it, and not the stream that is current.
    """

    waits: WorkWaits
    works: Future[Sequence[dist.Work]]
    tensor: Tensor
    moved: Tensor
    is_on_host: bool

    def wait(self, timeout_s: float, *, late: TransportError, failed: str) -> None:
        """Waits until ``moved`` holds the result.

        Args:
            timeout_s: seconds after which the host gives up; a stream does at the group's limit.
            late: the error of giving up.
            failed: the text of another error, before torch's reason.

        Raises:
            TransportError: it did not end in time, or it failed, as another rank has gone.
            BaseException: the error of :meth:`DeviceGroup.abort`.
        """
        for work in self.waits.result(self.works, timeout_s, late=late, failed=failed):
            self.waits.wait(work, timeout_s, late=late, failed=failed, is_on_host=self.is_on_host)

    def wait_in_place(self, timeout_s: float, *, late: TransportError, failed: str) -> None:
        """Waits until the tensor that was given holds the result."""
        self.wait(timeout_s, late=late, failed=failed)
        if self.moved is not self.tensor:
            self.tensor.copy_(self.moved, non_blocking=True)


def all_reduce(group: Any, tensor: Tensor) -> Sequence[dist.Work]:
    """An :data:`Operation`: the sum over the ranks of a group, in place."""
    return [group.allreduce([tensor])]


def common_backend(devices: Sequence[RankDevice]) -> str:
    """By which backend of ``torch.distributed`` some ranks exchange tensors of their devices."""
    is_gloo = choose_wire(devices) is not Wire.DEVICES
    return "gloo" if is_gloo else device_backend(torch.device(devices[0].type))


def apart_from_world(
    backend: str, store: Store, rank: int, num_ranks: int, timeout_s: float
) -> Any:
    """A process group whose ranks are not in one world of ``torch.distributed``.

    Args:
        backend: see :func:`common_backend`.
        store: of its ranks alone.
        rank: of this one among them.
        num_ranks: how many they are.
        timeout_s: limit of every operation.
    """
    timeout = timedelta(seconds=timeout_s)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, num_ranks, timeout)
    kind: Any = getattr(dist, f"ProcessGroup{backend.upper()}")  # as torch does for its own groups
    options = kind.Options()
    options._timeout = timeout
    return kind(store, rank, num_ranks, options)


def _thread_on(device: torch.device) -> ThreadPoolExecutor:
    """A thread that uses a device, and not the first one besides."""
    if device.type in _HOSTS:
        return ThreadPoolExecutor(1, "begin")
    set_device = torch.get_device_module(device).set_device
    return ThreadPoolExecutor(1, "begin", initializer=set_device, initargs=(device,))


def _done(works: Callable[[], Sequence[dist.Work]]) -> Future[Sequence[dist.Work]]:
    """What a call returns, or raises, for who waits for it."""
    found: Future[Sequence[dist.Work]] = Future()
    try:
        found.set_result(works())
    except RuntimeError as error:
        found.set_exception(error)
    return found


def abort_group(group: Any) -> None:
    """Ends what waits on a device for ranks that are gone; nobody waits for that here.

    An abort waits for the kernels of its group and, as it frees memory, for those of others: every
    group has a thread for it.
    """
    threading.Thread(target=_abort, args=(group,), daemon=True).start()


def _abort(group: Any) -> None:
    try:
        group.abort()
    except RuntimeError as error:
        log.warning("what waits on a device could not be aborted: %s", error)
