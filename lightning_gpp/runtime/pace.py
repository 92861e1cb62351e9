"""How fast a rank goes through its program: as fast as it can, unless it has a pace.

Emulated devices have one (:mod:`lightning_gpp.emulation`): their actions last as long as
the costs of a cluster say.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from lightning_gpp.runtime.action_record import ActionRecord
from lightning_gpp.schedule import Action, Program


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
