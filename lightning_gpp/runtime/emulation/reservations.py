"""Who has a channel when: all ranks of an emulation reserve channels in one place.

A message takes all of its channels for itself, from the first moment when it is ready and all of
them are free. Reservations are made in the order of the calls, and ranks make them when a message
is ready, so that the first to come is the first to be served.

A sum over ranks is a *meeting*: every rank says when it is ready, the last one reserves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Meeting(NamedTuple):
    """A sum over ranks.

    Attributes:
        ranks: who takes part.
        number: how many sums these ranks have begun before.
    """

    ranks: tuple[int, ...]
    number: int


class Reservations(Protocol):
    """The channels of a cluster; times are emulated seconds.

    Contract: ``tests/unit/runtime/emulation/test_reservations.py``.
    """

    def reserve(self, channels: Sequence[str], ready_s: float, duration_s: float) -> float:
        """Takes channels for some time.

        Args:
            channels: all of them at once.
            ready_s: not before.
            duration_s: for how long.

        Returns:
            When it starts: when it is ready and what was reserved before has left the channels.
        """

    def meet(
        self, meeting: Meeting, ready_s: float, channels: Sequence[str], duration_s: float
    ) -> None:
        """Says that a rank is ready for a sum; the last of its ranks reserves the channels."""

    def end_s(self, meeting: Meeting) -> float:
        """When a sum ends. Every rank asks once, after all of them have met."""
