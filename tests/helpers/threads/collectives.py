"""Collectives among threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.runtime.waits import TransportError, Waits, too_late


@dataclass(slots=True)
class _Round:
    """One collective: what every rank brought to it."""

    brought: dict[int, tuple[str, Any]] = field(default_factory=dict)
    num_taken: int = 0


class ThreadCollectiveHub:
    """Joins the collectives of ``num_ranks`` threads."""

    def __init__(self, num_ranks: int, timeout_s: float = 60.0) -> None:
        self.num_ranks, self.timeout_s = num_ranks, timeout_s
        self.changed = threading.Condition()
        self.waits = Waits()
        self.waits.on_abort.append(self._wake)
        self._rounds: dict[int, _Round] = {}

    def meet(self, rank: int, number: int, what: str, value: Any, purpose: str) -> list[Any]:
        """What all ranks brought to a collective, by rank.

        Raises:
            TransportError: another rank does another collective, or does not come.
        """
        deadline = time.monotonic() + self.timeout_s
        with self.changed:
            this = self._rounds.setdefault(number, _Round())
            this.brought[rank] = what, value
            self.changed.notify_all()
            while len(this.brought) < self.num_ranks:
                self.waits.check()
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    missing = sorted(set(range(self.num_ranks)) - this.brought.keys())
                    what = f"the collective with rank {', '.join(map(str, missing))} did not end"
                    raise TransportError(too_late(purpose, what, self.timeout_s))
                self.changed.wait(remaining_s)
            self.waits.check()
            this.num_taken += 1
            if this.num_taken == self.num_ranks:
                del self._rounds[number]
        found = {what for what, _ in this.brought.values()}
        if len(found) > 1:
            each = "; ".join(f"rank {r}: {w}" for r, (w, _) in sorted(this.brought.items()))
            raise TransportError(f"{purpose}: ranks do different collectives ({each})")
        return [this.brought[rank][1] for rank in range(self.num_ranks)]

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()


class ThreadCollectives:
    """The :class:`~lightning_gpp.spmd.run.moves.Collectives` of one thread.

    Args:
        hub: joins the threads.
        rank: of this one.
    """

    def __init__(self, hub: ThreadCollectiveHub, rank: int) -> None:
        self._hub, self._rank, self._count = hub, rank, 0
        self.waits = hub.waits

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def num_ranks(self) -> int:
        """Number of threads that are joined."""
        return self._hub.num_ranks

    def _meet(self, what: str, value: Any, purpose: str) -> list[Any]:
        number, self._count = self._count, self._count + 1
        return self._hub.meet(self._rank, number, what, value, purpose)

    def all_gather(
        self,
        shard: Tensor,
        shapes: Sequence[tuple[int, ...]],
        *,
        purpose: str,
    ) -> list[Tensor]:
        """The tensors of all ranks."""
        found = self._meet(f"all_gather {[*shapes]}", _copy(shard), purpose)
        return [_checked(each, shape) for each, shape in zip(found, shapes, strict=True)]

    def begin_all_reduce(self, tensor: Tensor, *, purpose: str) -> Callable[[], Tensor]:
        """A sum over ranks, which is over when it has begun: threads meet at once."""
        found = _sum(self._meet(f"all_reduce {tuple(tensor.shape)}", _copy(tensor), purpose))
        return lambda: found

    def all_to_all(
        self,
        parts: Sequence[Tensor],
        shapes: Sequence[tuple[int, ...]],
        *,
        purpose: str,
    ) -> list[Tensor]:
        """What came from each rank."""
        found = self._meet("all_to_all", [_copy(part) for part in parts], purpose)
        mine = [each[self._rank] for each in found]
        return [_checked(each, shape) for each, shape in zip(mine, shapes, strict=True)]

    def broadcast(
        self, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, *, purpose: str
    ) -> Tensor:
        """Rank 0's tensor."""
        given = None if tensor is None or self._rank else _copy(tensor)
        first = self._meet(f"broadcast {shape} {dtype}", given, purpose)[0]
        return _checked(first, shape).clone()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _checked(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != tuple(shape):
        raise TransportError(f"a shard of {tuple(tensor.shape)} came, expected {tuple(shape)}")
    return tensor


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total
