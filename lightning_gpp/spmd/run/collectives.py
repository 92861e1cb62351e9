"""What the ranks of an SPMD program do together, without autograd: the interface.

:mod:`lightning_gpp.runtime.collectives` keeps it over process groups of ``torch.distributed``.
Contract (``tests/distributed/collectives_contract.py``): all ranks call the same methods in the
same order; shards may differ in size and be empty; results do not alias arguments that are still
the caller's; every wait gives up after its limit with an error that names ``purpose``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Collectives(Protocol):
    """Collectives of one rank with the others."""

    rank: int
    num_ranks: int

    def all_to_all(
        self, parts: Sequence[Tensor], shapes: Sequence[Shape], *, purpose: str
    ) -> list[Tensor]:
        """Gives every rank its part; what came from each, whose shapes are given."""

    def begin_all_reduce(self, tensor: Tensor, *, purpose: str) -> Callable[[], Tensor]:
        """Begins a sum; calling what is returned waits for it. Others may come in between.

        The tensor is given away: the sum may take its memory.
        """

    def broadcast(
        self, tensor: Tensor | None, shape: Shape, dtype: torch.dtype, *, purpose: str
    ) -> Tensor:
        """Rank 0's tensor, which only rank 0 gives."""
