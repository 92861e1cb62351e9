"""What is on its way between ranks while they do something else."""

from __future__ import annotations

import re
from collections.abc import Iterable
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


def transfer_lanes(transfers: Iterable[Transfer]) -> dict[str, list[Transfer]]:
    """Every channel as a lane, or as several where its transfers overlap.

    >>> first = Transfer(TransferKind.MESSAGE, 0.0, 2.0, ("a out",), (0, 1))
    >>> second = Transfer(TransferKind.MESSAGE, 1.0, 3.0, ("a out", "bus"), (0, 1))
    >>> [(name, one.start_s) for name, (one,) in transfer_lanes([first, second]).items()]
    [('a out', 0.0), ('a out (2)', 1.0), ('bus', 1.0)]
    """
    lanes: dict[tuple[str, int], list[Transfer]] = {}
    for one in sorted(transfers, key=lambda one: (one.start_s, one.end_s)):
        for channel in one.channels:
            number = 1
            while (lane := lanes.setdefault((channel, number), [])) and (
                lane[-1].end_s > one.start_s
            ):
                number += 1
            lane.append(one)
    return {
        channel if number == 1 else f"{channel} ({number})": lane
        for (channel, number), lane in sorted(lanes.items(), key=lambda each: _natural(*each[0]))
    }


def _natural(name: str, number: int) -> tuple[list[tuple[int, str]], int]:
    """Sorts ``gpu2`` before ``gpu10``."""
    words = re.split(r"(\d+)", name)
    return [(int(word), "") if word.isdigit() else (-1, word) for word in words], number
