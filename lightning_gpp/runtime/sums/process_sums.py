"""Sums over ranks by the all-reduce of ``torch.distributed``: NCCL among GPUs, gloo otherwise.

Every set of ranks has a process group of its own. A sum goes on while its rank computes, whichever
it is (:mod:`~lightning_gpp.runtime.processes.device_group`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpp.runtime.processes.device_group import (
    DeviceGroup,
    PendingOperation,
    all_reduce,
    common_backend,
)
from lightning_gpp.runtime.processes.rank_devices import gather_rank_devices
from lightning_gpp.runtime.sums.sums import PendingSum, Ranks, late_sum
from lightning_gpp.runtime.transport.device_copies import DeviceCopies

CPU = torch.device("cpu")


class ProcessSums:
    """The :class:`~lightning_gpp.runtime.sums.sums.Sums` of one process.

    Args:
        groups: sets of ranks that will sum; all ranks of the world make the same ones together.
        timeout_s: limit that ``torch.distributed`` itself keeps.
        device: where this rank's tensors are.
        copies: through host memory; by default where they are needed.
    """

    def __init__(
        self,
        groups: Iterable[Ranks],
        timeout_s: float,
        device: torch.device = CPU,
        copies: DeviceCopies | None = None,
    ) -> None:
        devices = gather_rank_devices(device)
        timeout, own = timedelta(seconds=timeout_s), dist.get_rank()
        self._made: list[dist.ProcessGroup] = []
        self._groups: dict[Ranks, DeviceGroup] = {}
        for ranks in sorted(set(groups)):
            backend = common_backend([devices[rank] for rank in ranks])
            group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
            if own in ranks:
                assert isinstance(group, dist.ProcessGroup)
                self._made.append(group)
                is_gloo = backend == "gloo"
                self._groups[ranks] = DeviceGroup(group, device, is_gloo=is_gloo, copies=copies)

    def start(self, tensor: Tensor, ranks: Ranks) -> PendingSum:
        """Begins an all-reduce."""
        if tensor.is_meta:
            tensor = torch.zeros(1)  # ranks meet, there is nothing to add up
        return _ProcessSum(self._groups[ranks].begin(tensor, all_reduce), ranks)

    def abort(self, error: BaseException) -> None:
        """Makes every wait raise ``error``."""
        for group in self._groups.values():
            group.abort(error)

    def close(self) -> None:
        """Gives the groups back; all ranks call it."""
        for group in self._groups.values():
            group.close()
        for made in self._made:
            dist.destroy_process_group(made)
        self._groups, self._made = {}, []


@dataclass(frozen=True, slots=True)
class _ProcessSum:
    begun: PendingOperation
    ranks: Ranks

    def wait(self, timeout_s: float, purpose: str) -> None:
        others = ", ".join(map(str, self.ranks))
        self.begun.wait_in_place(
            timeout_s,
            late=late_sum(self.ranks, timeout_s, purpose),
            failed=f"{purpose}: summing gradients over ranks {others} failed",
        )
