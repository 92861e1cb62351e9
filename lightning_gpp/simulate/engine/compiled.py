"""A program and its costs as work that can be played, and what every number of it stands for."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_gpp.engine.work import Work
from lightning_gpp.schedule import Action
from lightning_gpp.simulate.simulation import TaskKind


class Shown(NamedTuple):
    """What an item, a message or a sum of one step is.

    Attributes:
        kind: the kind of its task; None of what is not shown: what waits alone, and tokens.
        action: the action that it is, or belongs to.
        size_bytes: of a message or a sum.
        channels: that a message or a sum occupies, by name.
    """

    kind: TaskKind | None
    action: Action | None
    size_bytes: float | None = None
    channels: tuple[str, ...] = ()


WAIT = Shown(None, None)
"""Of an item that waits alone."""


@dataclass(frozen=True)
class Compiled:
    """One step of a program.

    Attributes:
        work: what is played.
        num_devices: so many lines are devices; where the host reads ahead, its line follows.
        items: what every item is.
        messages: what every message is, in the order of the items that send them.
        sums: what every sum is.
        first_items: of every line its first item.
        waits: item -> the senders of what it waits for (-1 for none), and the actions that receive.
    """

    work: Work
    num_devices: int
    items: list[Shown] = field(default_factory=list)
    messages: list[Shown] = field(default_factory=list)
    sums: list[Shown] = field(default_factory=list)
    first_items: list[int] = field(default_factory=list)
    waits: dict[int, list[tuple[int, Action | None]]] = field(default_factory=dict)

    def line(self, item: int) -> int:
        """The line that an item belongs to."""
        return bisect_right(self.first_items, item) - 1
