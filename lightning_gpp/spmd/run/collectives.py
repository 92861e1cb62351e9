"""What the ranks of an SPMD program do together, without autograd: the interface.

:mod:`lightning_gpp.runtime.collectives` keeps it over process groups of ``torch.distributed``.
Contract (``tests/distributed/collectives_contract.py``): all ranks call the same methods in the
same order; shards may differ in size and be empty; results do not alias arguments that are still
the caller's; sums are added in the order of the ranks, so they have the same bits everywhere; every
wait gives up after its limit with an error that names what it waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Collectives(Protocol):
    """Collectives of one rank with the others.

    ``purpose`` is what for, for the texts of errors.
    """

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""

    def all_gather(self, shard: Tensor, shapes: Sequence[Shape], *, purpose: str) -> list[Tensor]:
        """The tensors of all ranks, whose shapes are given by rank."""

    def reduce_scatter(self, parts: Sequence[Tensor], *, purpose: str) -> Tensor:
        """The sum over ranks of the part with this rank's number."""

    def all_reduce(self, tensor: Tensor, *, purpose: str) -> Tensor:
        """The sum over ranks."""

    def begin_all_reduce(self, tensor: Tensor, *, purpose: str) -> Callable[[], Tensor]:
        """Begins a sum; calling what is returned waits for it. Others may come in between.

        The tensor is given away: the sum may take its memory.
        """

    def all_to_all(
        self, parts: Sequence[Tensor], shapes: Sequence[Shape], *, purpose: str
    ) -> list[Tensor]:
        """Gives every rank its part; what came from each, whose shapes are given."""

    def broadcast(
        self, tensor: Tensor | None, shape: Shape, dtype: torch.dtype, *, purpose: str
    ) -> Tensor:
        """Rank 0's tensor, which only rank 0 gives."""

    def scatter(
        self,
        parts: Sequence[Tensor] | None,
        shapes: Sequence[Shape],
        dtype: torch.dtype,
        *,
        purpose: str,
    ) -> Tensor:
        """This rank's one of rank 0's parts, which only rank 0 gives."""

    def gather(
        self, shard: Tensor, shapes: Sequence[Shape], *, purpose: str
    ) -> list[Tensor] | None:
        """On rank 0 the tensors of all ranks; None elsewhere."""

    def reduce(self, tensor: Tensor, *, purpose: str) -> Tensor | None:
        """On rank 0 the sum over ranks; None elsewhere."""
