"""Gradients of whole parameters, of which every device has a summand: summed in few messages.

A message costs its latency whatever its size, and a model has hundreds of parameters. So summands
wait for others until a bucket of them is full, whose sum begins then, beside the rest of the
backward, as in ``torch.nn.parallel.DistributedDataParallel`` (Li et al., VLDB 2020). All devices
go backward in one order, so buckets are alike everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_gpp.cluster import BUCKET_BYTES
from lightning_gpp.spmd.run.collectives import Collectives
from lightning_gpp.spmd.run.emulated import EmulatedProgram

_Summand = tuple[Tensor, Tensor]
"""A parameter, and this device's summand of its gradient."""


@dataclass(slots=True)
class GradientSums:
    """The sums of one backward.

    Attributes:
        collectives: of this device with the others.
        bucket_bytes: from which on a bucket is full.
        pace: of this device, if it has one.
    """

    collectives: Collectives
    bucket_bytes: int = BUCKET_BYTES
    pace: EmulatedProgram | None = None
    _open: list[_Summand] = field(default_factory=list)
    _size_bytes: int = 0
    _begun: list[tuple[list[_Summand], Callable[[], Tensor]]] = field(default_factory=list)

    def add(self, parameter: Tensor, summand: Tensor) -> None:
        """A summand of a parameter's gradient, which the parameter gets in :meth:`finish`."""
        if self._open and self._open[0][1].dtype != summand.dtype:
            self._begin()
        self._open.append((parameter, summand))
        self._size_bytes += summand.nbytes
        if self._size_bytes >= self.bucket_bytes:
            self._begin()

    def _begin(self) -> None:
        bucket, self._open, self._size_bytes = self._open, [], 0
        flat = torch.cat([summand.reshape(-1) for _, summand in bucket])
        purpose = f"summing the gradients of {len(bucket)} parameters"
        ended = self.collectives.begin_all_reduce(flat, purpose=purpose)
        if self.pace is not None:
            ended = _then(ended, self.pace.begin_sum(flat.nbytes))
        self._begun.append((bucket, ended))

    def finish(self) -> None:
        """Waits for all sums and gives parameters their gradients."""
        if self._open:
            self._begin()
        begun, self._begun = self._begun, []
        for bucket, ended in begun:
            sizes = [summand.numel() for _, summand in bucket]
            for (parameter, summand), found in zip(
                bucket, torch.split(ended(), sizes), strict=True
            ):
                torch.autograd.backward(parameter, found.reshape(summand.shape))

    def forget(self) -> None:
        """Leaves out what an earlier backward left behind that failed."""
        self._open, self._size_bytes, self._begun = [], 0, []


def _then(ended: Callable[[], Tensor], paced: Callable[[], None]) -> Callable[[], Tensor]:
    """Ends a sum, and then the time that it takes."""

    def both() -> Tensor:
        found = ended()
        paced()
        return found

    return both
