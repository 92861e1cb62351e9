"""Sums of tensors over some ranks, in the background: the gradients of replicas.

Contract (``tests/distributed/sums_contract.py``): :meth:`Sums.start` returns at once
and the tensor is summed in place while its rank goes on; all ranks of a group begin its sums in
the same order; the result has the same bits on all of them; waiting gives up after ``timeout_s``
with a :class:`~lightning_gpp.runtime.waits.TransportError`; the error that ends all waits of a rank
(:class:`~lightning_gpp.runtime.waits.Waits`) ends these, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

Ranks = tuple[int, ...]


PendingSum = Callable[[float, str], None]
"""Waits until a tensor holds the sum that has begun: gets the seconds after which to give up, and
what for, for the error text (``"stage 2, replica 0 of 2, action 2R0"``)."""


class Sums(Protocol):
    """Begins sums on one rank."""

    def start(self, tensor: Tensor, ranks: Ranks) -> PendingSum:
        """Begins to sum a contiguous tensor in place over ranks, this one among them."""


def late_sum(ranks: Ranks, timeout_s: float, purpose: str) -> str:
    """The error of a sum that took too long."""
    return (
        f"{purpose}: the gradients of ranks {', '.join(map(str, ranks))} were not summed within "
        f"{timeout_s:g} s; raise `timeout` if the work before it can take longer"
    )
