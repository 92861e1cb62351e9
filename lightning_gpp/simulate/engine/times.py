"""When everything of a played program happened, slot by slot."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lightning_gpp.engine.play import Played
from lightning_gpp.engine.trace import WorkTrace, trace
from lightning_gpp.simulate.engine.compiled import Compiled, Shown


@dataclass(frozen=True)
class Times:
    """When everything happened, found when it is asked for.

    Attributes:
        compiled: a step.
        played: of as many steps as there are.
        num_steps: how many.
    """

    compiled: Compiled
    played: Played
    num_steps: int

    @cached_property
    def trace(self) -> WorkTrace:
        """Start, end and cause of everything."""
        return trace(self.compiled.work.repeated(self.num_steps), self.played)

    def shown(self, slot: int) -> tuple[int, Shown]:
        """The step that a slot is of, and what it is."""
        found, compiled = self.trace, self.compiled
        if slot < found.first_message:
            kinds, first = compiled.items, 0
        elif slot < found.first_sum:
            kinds, first = compiled.messages, found.first_message
        else:
            kinds, first = compiled.sums, found.first_sum
        step, number = divmod(slot - first, len(kinds))
        return step, kinds[number]

    @property
    def last_step_s(self) -> float:
        """Seconds by which the last step ends after the one before it."""
        if self.num_steps == 1:
            return self.played.step_s
        ends_s = [0.0] * self.num_steps
        for slot, end_s in enumerate(self.trace.end_s):
            step, _ = self.shown(slot)
            ends_s[step] = max(ends_s[step], end_s)
        return ends_s[-1] - ends_s[-2]
