"""Sums over ranks by the all-reduce of ``torch.distributed``: gloo on CPUs, NCCL on GPUs.

Every set of ranks has a process group of its own. gloo works on threads of its own, so a sum goes
on while its rank computes. (The NCCL path has not been run yet.)
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from lightning_gpp.runtime.sums import PendingSum, Ranks, late_sum
from lightning_gpp.runtime.transport import TransportError


class ProcessSums:
    """The :class:`~lightning_gpp.runtime.sums.Sums` of one process.

    Args:
        groups: sets of ranks that will sum; all ranks of the world make the same ones together.
        timeout_s: limit that ``torch.distributed`` itself keeps.
    """

    def __init__(self, groups: Iterable[Ranks], timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._groups = {
            ranks: dist.new_group(list(ranks), timeout=timeout) for ranks in sorted(set(groups))
        }
        self._rank = dist.get_rank()
        self._waiting: set[_ProcessSum] = set()
        self._error: BaseException | None = None

    def start(self, tensor: Tensor, ranks: Ranks) -> PendingSum:
        """Begins an all-reduce."""
        work = dist.all_reduce(tensor, group=self._groups[ranks], async_op=True)
        assert work is not None
        return _ProcessSum(self, work, ranks, waits_here=tensor.device.type == "cpu")

    def abort(self, error: BaseException) -> None:
        """Makes every wait raise ``error``."""
        self._error = error
        for pending in tuple(self._waiting):
            pending.wake()

    def close(self) -> None:
        """Gives the groups back; all ranks call it."""
        for ranks, group in self._groups.items():
            if self._rank in ranks:
                dist.destroy_process_group(group)
        self._groups = {}

    def enter(self, pending: _ProcessSum) -> None:
        """Notes who waits, so that an abort can wake it."""
        self._waiting.add(pending)
        if self._error is not None:
            pending.wake()

    def leave(self, pending: _ProcessSum) -> None:
        """The wait is over.

        Raises:
            BaseException: the error of :meth:`abort`.
        """
        self._waiting.discard(pending)
        if self._error is not None:
            raise self._error


class _ProcessSum:
    def __init__(self, sums: ProcessSums, work: dist.Work, ranks: Ranks, waits_here: bool) -> None:
        self._sums, self._work, self._ranks = sums, work, ranks
        self._woken = threading.Event()
        if waits_here:
            work.get_future().add_done_callback(lambda _: self._woken.set())
        else:
            self._woken.set()  # of a GPU the stream waits, not the host

    def wake(self) -> None:
        self._woken.set()

    def wait(self, timeout_s: float, purpose: str) -> None:
        self._sums.enter(self)
        in_time = self._woken.wait(timeout_s)
        self._sums.leave(self)
        if not in_time:
            raise late_sum(self._ranks, timeout_s, purpose)
        try:
            self._work.wait()
        except RuntimeError as error:
            others = ", ".join(map(str, self._ranks))
            reason = str(error).strip().splitlines()[0]
            raise TransportError(
                f"{purpose}: summing gradients over ranks {others} failed ({reason})"
            ) from error
