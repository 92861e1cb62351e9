"""Gradients of whole parameters, of which every device has a summand: summed in few messages.

A message costs its latency whatever its size, and a model has hundreds of parameters. So summands
wait for others until a bucket of them is full, whose sum begins then, beside the rest of the
backward, as in ``torch.nn.parallel.DistributedDataParallel`` (Li et al., VLDB 2020). All devices
go backward in one order, so buckets are alike everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.cluster import BUCKET_BYTES
from lightning_gpp.spmd.run.collectives import Collectives

_Summand = tuple[Tensor, Tensor]
"""A parameter, and this device's summand of its gradient."""

_Begun = tuple[list[Tensor], Callable[[], Tensor]]
"""Parameters of a bucket, and what waits for its sum; their summands are given up by then."""


class _Given(torch.autograd.Function):
    """Something of parameters, by whose backward they get gradients that there are already."""

    @staticmethod
    def forward(ctx: Any, gradients: Iterator[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.gradients)


def give_gradients(parameters: Iterable[Tensor], gradients: Iterator[Tensor]) -> None:
    """Adds gradients to those that parameters have, whose hooks see them.

    A parameter without one gets the tensor itself: ``torch.autograd.backward(parameter, gradient)``
    would copy it, as its caller has it, too.

    Args:
        parameters: that are trained, each once.
        gradients: theirs, in the same order, which nobody else is to have.
    """
    with torch.enable_grad():
        given: Tensor = _Given.apply(gradients, *parameters)  # type: ignore[no-untyped-call]
    given.backward()  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class GradientSums:
    """The sums of one backward.

    Attributes:
        collectives: of this device with the others.
        bucket_bytes: from which on a bucket is full.
    """

    collectives: Collectives
    bucket_bytes: int = BUCKET_BYTES
    _open: list[_Summand] = field(default_factory=list)
    _size_bytes: int = 0
    _begun: list[_Begun] = field(default_factory=list)

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
        self._begun.append(([parameter for parameter, _ in bucket], ended))

    def finish(self) -> None:
        """Waits for all sums and gives parameters their gradients."""
        if self._open:
            self._begin()
        begun, self._begun = self._begun, []
        for parameters, ended in begun:
            give_gradients(parameters, _cut(ended(), parameters))


def _cut(flat: Tensor, parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """The gradients of parameters, one after the other in memory."""
    start = 0
    for parameter in parameters:
        yield flat[start : start + parameter.numel()].reshape(parameter.shape)
        start += parameter.numel()
