"""What is on its way between ranks while they do something else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class TransferKind(Enum):
    """What is on its way.

    Attributes:
        MESSAGE: what one stage sends to another.
        SUM: gradients that several ranks add up.
    """

    MESSAGE = "message"
    SUM = "sum"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Something that occupies channels and no rank.

    Of a measured step it is known when a message was handed over and when its receiver had it: the
    transfer lasts from the one to the other, although it may have arrived before it was asked for.

    Attributes:
        kind: what.
        start_s: seconds since the step began.
        end_s: likewise; not before ``start_s``.
        channels: names of what it occupies; of a measured step the two ranks (``"rank 0 → 1"``).
        ranks: from where to where; all ranks of a sum.
        action: text form of the action that sends it (``"2SF0>3"``), or that waits for the sum.
        size_bytes: where known.
        minibatch: which mini-batch of the step.
        waited_s: seconds that it waited for an occupied channel; known where predicted.
    """

    kind: TransferKind
    start_s: float
    end_s: float
    channels: tuple[str, ...]
    ranks: tuple[int, ...]
    action: str | None = None
    size_bytes: int | None = None
    minibatch: int = 0
    waited_s: float = 0.0

    @property
    def name(self) -> str:
        """The action, or what else it is (``"copy"``)."""
        return self.action if self.action is not None else self.kind.value

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class TransferLane:
    """Transfers over one channel that do not overlap.

    Attributes:
        name: of the channel; the second and later lanes of a channel have a number.
        transfers: indices, in the order of time.
    """

    name: str
    transfers: tuple[int, ...]


def transfer_lanes(transfers: Sequence[Transfer]) -> tuple[TransferLane, ...]:
    """Every channel as a lane, or as several where its transfers overlap.

    >>> first = Transfer(TransferKind.MESSAGE, 0.0, 2.0, ("a out",), (0, 1))
    >>> second = Transfer(TransferKind.MESSAGE, 1.0, 3.0, ("a out", "bus"), (0, 1))
    >>> [(lane.name, lane.transfers) for lane in transfer_lanes([first, second])]
    [('a out', (0,)), ('a out (2)', (1,)), ('bus', (1,))]
    """
    channels: dict[str, list[int]] = {}
    for index, transfer in enumerate(transfers):
        for channel in transfer.channels:
            channels.setdefault(channel, []).append(index)
    return tuple(
        TransferLane(channel if number == 0 else f"{channel} ({number + 1})", tuple(lane))
        for channel, indices in sorted(channels.items(), key=lambda item: _natural(item[0]))
        for number, lane in enumerate(_without_overlap(transfers, indices))
    )


def _without_overlap(transfers: Sequence[Transfer], indices: Sequence[int]) -> list[list[int]]:
    """Each goes into the first lane that is free when it starts."""
    lanes: list[list[int]] = []
    for index in sorted(indices, key=lambda i: (transfers[i].start_s, transfers[i].end_s)):
        start_s = transfers[index].start_s
        free = [lane for lane in lanes if transfers[lane[-1]].end_s <= start_s]
        if free:
            free[0].append(index)
        else:
            lanes.append([index])
    return lanes


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts ``gpu2`` before ``gpu10``."""
    words = re.split(r"(\d+)", name)
    return [(int(word), "") if word.isdigit() else (-1, word) for word in words]
