"""Sums over ranks by the all-reduce of ``torch.distributed``: NCCL among GPUs, gloo otherwise.

Every set of ranks has a process group of its own. A sum goes on while its rank computes, whichever
it is (:mod:`~lightning_gpp.runtime.processes.device_group`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_gpp.runtime.device_copies import DeviceCopies
from lightning_gpp.runtime.processes.device_group import DeviceGroup, all_reduce
from lightning_gpp.runtime.sums.sums import PendingSum, Ranks, late_sum
from lightning_gpp.runtime.waits import Waits

CPU = torch.device("cpu")


class ProcessSums:
    """The :class:`~lightning_gpp.runtime.sums.sums.Sums` of one process.

    Args:
        groups: sets of ranks that will sum; all ranks of the world make the same ones together.
        timeout_s: limit that ``torch.distributed`` itself keeps.
        device: where this rank's tensors are.
        waits: of this rank.
        copies: through host memory; by default where they are needed.
    """

    def __init__(
        self,
        groups: Iterable[Ranks],
        timeout_s: float,
        device: torch.device = CPU,
        waits: Waits | None = None,
        copies: DeviceCopies | None = None,
    ) -> None:
        self.waits = waits or Waits()
        self._groups: dict[Ranks, DeviceGroup] = {}
        for ranks in sorted(set(groups)):
            group = DeviceGroup.new(ranks, device, timeout_s, self.waits, copies)
            if group is not None:
                self._groups[ranks] = group

    def start(self, tensor: Tensor, ranks: Ranks) -> PendingSum:
        """Begins an all-reduce."""
        if tensor.is_meta:
            tensor = torch.zeros(1)  # ranks meet, there is nothing to add up
        begun = self._groups[ranks].begin(tensor, all_reduce)

        def wait(timeout_s: float, purpose: str) -> None:
            late = late_sum(ranks, timeout_s, purpose)
            others = ", ".join(map(str, ranks))
            failed = f"{purpose}: summing gradients over ranks {others} failed"
            begun.wait_in_place(timeout_s, late=late, failed=failed)

        return wait

    def close(self) -> None:
        """Gives the groups back; all ranks call it."""
        for group in self._groups.values():
            group.destroy()
        self._groups = {}
