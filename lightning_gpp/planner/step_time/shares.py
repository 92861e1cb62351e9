"""How replicas take the samples of a mini-batch, and what two of them hand over."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from operator import itemgetter
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


class MessageKind(NamedTuple):
    """What messages have in common that take as long.

    Attributes:
        pair: the replicas that send and receive.
        num_units: smallest micro-batches that a message carries.
    """

    pair: tuple[int, int]
    num_units: int


class EdgeMessages(NamedTuple):
    """The messages of an edge in one direction, each what two micro-batches have in common.

    Attributes:
        kinds: those that occur.
        counts: how many there are of each kind.
        each: of every message the sender's micro-batch, the receiver's (counted on over their
            replicas) and the number of its kind, in the order in which every replica sends them.
    """

    kinds: tuple[MessageKind, ...]
    counts: tuple[int, ...]
    each: tuple[tuple[int, int, int], ...]


@lru_cache(maxsize=4096)  # many plans have stages of the same shape
def messages(source: Share, target: Share) -> tuple[EdgeMessages, EdgeMessages]:
    """The messages of an edge: there, and back."""
    found: list[tuple[int, int, int, int, int]] = []
    senders, receivers = source.pieces(), target.pieces()
    unit = sent = received = 0
    while unit < source.num_units * source.num_microbatches:
        if sent == unit:
            sent, sender, i = next(senders)
        if received == unit:
            received, receiver, j = next(receivers)
        stop = min(sent, received)
        found.append((sender, receiver, i, j, stop - unit))
        unit = stop
    back = [(receiver, sender, j, i, units) for sender, receiver, i, j, units in found]
    return _as_sent(found), _as_sent(back)


def _as_sent(found: list[tuple[int, int, int, int, int]]) -> EdgeMessages:
    """For every micro-batch those to the first replica first."""
    kinds: dict[MessageKind, int] = {}
    counts: list[int] = []
    each = []
    for sender, receiver, i, j, units in sorted(found, key=itemgetter(0, 3)):
        kind = kinds.setdefault(MessageKind((i, j), units), len(kinds))
        if kind == len(counts):
            counts.append(0)
        counts[kind] += 1
        each.append((sender, receiver, kind))
    return EdgeMessages(tuple(kinds), tuple(counts), tuple(each))
