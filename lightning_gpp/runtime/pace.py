"""When a rank ran its actions, and how fast it goes: as fast as it can, unless it has a pace.

Emulated devices have one (:mod:`lightning_gpp.emulation`): their actions last as long as
the costs of a cluster say.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from lightning_gpp.schedule import Action, Program


@dataclass(frozen=True, slots=True)
class ActionRecord:
    """When an action ran, on the machine's monotonic clock (``time.monotonic_ns``).

    Work on a GPU is waited for at the end of each recorded action, so that the times are those of
    the work and not those of its launch.

    Attributes:
        action: what ran.
        start_ns: when it began.
        end_ns: when it was done.
        size_bytes: tensors in the message that was sent or received; None for other actions.
        loss_start_ns: when the user's step went on with the model's outputs, in forwards of the
            loss stage that have a loss of their own; from there to ``end_ns`` it is the user's own
            code.
    """

    action: Action
    start_ns: int
    end_ns: int
    size_bytes: int | None = None
    loss_start_ns: int | None = None


class Pace(Protocol):
    """Wraps what a rank does; may let time pass before and after it."""

    def run(self, program: Program, device: int, has_sums: bool) -> AbstractContextManager[None]:
        """The body runs a device's part of a program; ``has_sums``: those of gradients, too."""

    def action(self, action: Action) -> AbstractContextManager[None]:
        """The body does the work of one action of that program."""

    def timed(self, record: ActionRecord) -> ActionRecord:
        """The record of the action that was done last, with the moments that it has at this pace.

        They are of a clock that all ranks share, which stands still while nothing is at this pace.
        """
