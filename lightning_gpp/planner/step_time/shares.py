"""How replicas take the samples of a mini-batch, and what two of them hand over."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple


class Share(NamedTuple):
    """How the replicas of a stage take a mini-batch.

    Attributes:
        units: smallest micro-batches in the micro-batch of each replica.
        num_microbatches: of each.
    """

    units: tuple[int, ...]
    num_microbatches: int

    @property
    def num_replicas(self) -> int:
        """Replicas of the stage."""
        return len(self.units)

    @property
    def num_units(self) -> int:
        """Smallest micro-batches in one of the stage, all replicas together."""
        return sum(self.units)

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """(end, number, replica) of every micro-batch of every replica, in the order of units."""
        end = 0
        for microbatch in range(self.num_microbatches):
            for replica, units in enumerate(self.units):
                end += units
                yield end, replica * 2 * self.num_microbatches + microbatch, replica


class SharedPart(NamedTuple):
    """What two micro-batches of replicas have in common: a message.

    Attributes:
        sender: micro-batch of the sender, counted on over its replicas.
        receiver: likewise.
        pair: its replica, and that of the receiver.
        num_units: what the message carries.
    """

    sender: int
    receiver: int
    pair: tuple[int, int]
    num_units: int


@lru_cache(maxsize=4096)  # many plans have stages of the same shape
def parts(source: Share, target: Share) -> tuple[tuple[SharedPart, ...], tuple[SharedPart, ...]]:
    """The messages of an edge in the order in which every replica sends them: there, and back."""
    found: list[SharedPart] = []
    senders, receivers = source.pieces(), target.pieces()
    unit = sent = received = 0
    while unit < source.num_units * source.num_microbatches:
        if sent == unit:
            sent, sender, i = next(senders)
        if received == unit:
            received, receiver, j = next(receivers)
        stop = min(sent, received)
        found.append(SharedPart(sender, receiver, (i, j), stop - unit))
        unit = stop
    back = [SharedPart(p.receiver, p.sender, p.pair[::-1], p.num_units) for p in found]
    return tuple(_as_sent(found)), tuple(_as_sent(back))


def _as_sent(found: list[SharedPart]) -> list[SharedPart]:
    """For every micro-batch those to the first replica first."""
    return sorted(found, key=lambda part: (part.sender, part.pair[1]))
