"""Sums of tensors over some ranks, in the background: the gradients of replicas.

Contract (``tests/distributed/sums_contract.py``): :meth:`Sums.start` returns at once
and the tensor is summed in place while its rank goes on; all ranks of a group begin its sums in
the same order; the result has the same bits on all of them; waiting gives up after ``timeout_s``
with a :class:`~lightning_gpp.runtime.waits.TransportError`; the error that ends all waits of a rank
(:class:`~lightning_gpp.runtime.waits.Waits`) ends these, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_gpp.runtime.payload import Payload, pack, unpack
from lightning_gpp.runtime.processes.device_group import DeviceGroup, all_reduce
from lightning_gpp.runtime.processes.rank_devices import pipelines_of
from lightning_gpp.runtime.transport.transport import Tag, Transport
from lightning_gpp.runtime.waits import Waits

Ranks = tuple[int, ...]


PendingSum = Callable[[float, str], object]
"""Waits until a tensor holds the sum that has begun: gets the seconds after which to give up, and
what for, for the error text (``"stage 2, replica 0 of 2, action 2R0"``)."""


class Sums(Protocol):
    """Begins sums on one rank."""

    def start(self, tensor: Tensor, ranks: Ranks) -> PendingSum:
        """Begins to sum a contiguous tensor in place over ranks, this one among them."""


CPU = torch.device("cpu")


class ProcessSums:
    """The :class:`~lightning_gpp.runtime.sums.sums.Sums` of one process.

    Args:
        groups: sets of ranks of a pipeline that will sum; all ranks of the world make the same
            ones together.
        timeout_s: limit that ``torch.distributed`` itself keeps.
        device: where this rank's tensors are.
        waits: of this rank.
        num_pipelines: that are side by side, each with sums of its own.
    """

    def __init__(
        self,
        groups: Iterable[Ranks],
        timeout_s: float,
        device: torch.device = CPU,
        waits: Waits | None = None,
        num_pipelines: int = 1,
    ) -> None:
        self.waits = waits or Waits()
        self._groups: dict[Ranks, DeviceGroup] = {}
        for ranks in sorted(set(groups)):
            sets = [[own[rank] for rank in ranks] for own in pipelines_of(num_pipelines)]
            group = DeviceGroup.new(sets, device, timeout_s, self.waits)
            if group is not None:
                self._groups[ranks] = group

    def start(self, tensor: Tensor, ranks: Ranks) -> PendingSum:
        """Begins an all-reduce."""
        if tensor.is_meta:
            tensor = torch.zeros(1)  # ranks meet, there is nothing to add up
        missing = f"the gradients of ranks {', '.join(map(str, ranks))} were not summed"
        return self._groups[ranks].begin(tensor, all_reduce, missing, in_place=True)

    def close(self) -> None:
        """Gives the groups back; all ranks call it."""
        for group in self._groups.values():
            group.destroy()
        self._groups = {}


SHARED_GRADIENTS = -2
"""First number of the tags of messages with gradients."""


def sum_shared(
    parameters: Sequence[Parameter],
    ranks: Sequence[int],
    number: int,
    transport: Transport,
    receive: Callable[[int, Tag], Payload],
) -> None:
    """Sums gradients by messages: of what stages share, and sparse ones of replicas.

    The first of the ranks adds them up and answers with the sum. A message takes what there is:
    replicas do not know of each other which rows of a table they used.

    Args:
        parameters: the same on all of the ranks.
        ranks: those that hold it.
        number: of the sum, for the tags.
        transport: of this rank.
        receive: receives a message from a rank.
    """
    up: Tag = (SHARED_GRADIENTS, number, 0, 0)
    down: Tag = (SHARED_GRADIENTS, number, 1, 0)
    gradients: list[Tensor | None] = [parameter.grad for parameter in parameters]
    if transport.rank != ranks[0]:
        transport.send(pack(gradients), target=ranks[0], tag=up)
        gradients = unpack(receive(ranks[0], down))
    else:
        for rank in ranks[1:]:
            gradients = _added(gradients, unpack(receive(rank, up)))
        for rank in ranks[1:]:
            transport.send(pack(gradients), target=rank, tag=down)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _added(
    gradients: Sequence[Tensor | None], others: Sequence[Tensor | None]
) -> list[Tensor | None]:
    return [
        other if own is None else own if other is None else own + other
        for own, other in zip(gradients, others, strict=True)
    ]
