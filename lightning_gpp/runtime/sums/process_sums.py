"""Sums over ranks by the all-reduce of ``torch.distributed``: NCCL among GPUs, gloo otherwise.

Every set of ranks has a process group of its own. gloo works on threads of its own, so a sum goes
on while its rank computes; what a GPU adds to it is copied to host memory and the sum back. (No GPU
has run either path yet.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpp.runtime.processes.rank_devices import Wire, choose_wire, gather_rank_devices
from lightning_gpp.runtime.processes.work_waits import WorkWaits
from lightning_gpp.runtime.sums.sums import PendingSum, Ranks, late_sum

CPU = torch.device("cpu")


class ProcessSums:
    """The :class:`~lightning_gpp.runtime.sums.sums.Sums` of one process.

    Args:
        groups: sets of ranks that will sum; all ranks of the world make the same ones together.
        timeout_s: limit that ``torch.distributed`` itself keeps.
        device: where this rank's tensors are.
    """

    def __init__(
        self,
        groups: Iterable[Ranks],
        timeout_s: float,
        device: torch.device = CPU,
    ) -> None:
        devices = gather_rank_devices(device)
        by_nccl = {
            ranks: choose_wire([devices[rank] for rank in ranks]) is Wire.NCCL
            for ranks in sorted(set(groups))
        }
        timeout = timedelta(seconds=timeout_s)
        self._groups = {
            ranks: dist.new_group(list(ranks), timeout=timeout, backend="nccl" if nccl else "gloo")
            for ranks, nccl in by_nccl.items()
        }
        self._by_nccl = by_nccl
        self._rank = dist.get_rank()
        self._waits = WorkWaits()

    def start(self, tensor: Tensor, ranks: Ranks) -> PendingSum:
        """Begins an all-reduce."""
        summed = self._on_the_wire(tensor, self._by_nccl[ranks])
        work = dist.all_reduce(summed, group=self._groups[ranks], async_op=True)
        assert work is not None
        return _ProcessSum(self._waits, work, ranks, tensor, summed)

    @staticmethod
    def _on_the_wire(tensor: Tensor, by_nccl: bool) -> Tensor:
        if tensor.is_meta:
            return torch.zeros(1)  # ranks meet, there is nothing to add up
        return tensor if by_nccl else tensor.cpu()

    def abort(self, error: BaseException) -> None:
        """Makes every wait raise ``error``."""
        self._waits.abort(error)

    def close(self) -> None:
        """Gives the groups back; all ranks call it."""
        for ranks, group in self._groups.items():
            if self._rank in ranks:
                dist.destroy_process_group(group)
        self._groups = {}


@dataclass(frozen=True, slots=True)
class _ProcessSum:
    waits: WorkWaits
    work: dist.Work
    ranks: Ranks
    tensor: Tensor
    summed: Tensor

    def wait(self, timeout_s: float, purpose: str) -> None:
        others = ", ".join(map(str, self.ranks))
        self.waits.wait(
            self.work,
            timeout_s,
            late=late_sum(self.ranks, timeout_s, purpose),
            failed=f"{purpose}: summing gradients over ranks {others} failed",
            is_on_host=self.summed.device.type == "cpu",
        )
        if self.summed is not self.tensor and not self.tensor.is_meta:
            self.tensor.copy_(self.summed)
