"""Endless training as windows: every device's work for one mini-batch after another.

Where the pipeline does not drain, nobody knows how many mini-batches there will be: the user's loop
asks for one step after the other, and each of them is a *window* of a program that could go on for
ever. In window ``t`` a stage runs the forward of mini-batch ``t + lead``, where its *lead* is what
it has in flight but one; then the backward of mini-batch ``t``, and the update. The first window
runs the forwards of all mini-batches up to the lead (the pipeline fills); the last ones have no
forward left (it drains)::

    stage 0, lead 2:  F0 F1 F2 B0 S0 | F3 B1 S1 | F4 B2 S2 | ... | B8 S8 | B9 S9
    stage 2, lead 0:  F0       B0 S0 | F1 B1 S1 | F2 B2 S2 | ... | F8 B8 S8 | F9 B9 S9

All windows between are the same but for the numbers of the mini-batches, so that a few short
programs have them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_gpp.graph import StageGraph
from lightning_gpp.schedule.action import Action, Kind
from lightning_gpp.schedule.program import Program
from lightning_gpp.schedule.schedules import in_flight_units


@dataclass(frozen=True, slots=True)
class Window:
    """One mini-batch's part of a program of several.

    Attributes:
        program: of some mini-batches, one micro-batch each.
        number: of the mini-batch that goes backward in it, as the program counts.
    """

    program: Program
    number: int

    def actions(self, device: int) -> tuple[Action, ...]:
        """A device's actions in the window, up to the update that ends it."""
        return tuple(action for part in self._parts(device)[self.number :][:1] for action in part)

    def _parts(self, device: int) -> list[list[Action]]:
        """What a device does for every mini-batch, the updates left out."""
        parts: list[list[Action]] = [[]]
        for action in self.program.device_actions(device):
            if action.kind is Kind.STEP:
                parts.append([])
            else:
                parts[-1].append(action)
        return parts


@dataclass(slots=True)
class Windows:
    """The windows of an endless run of mini-batches of one micro-batch each.

    Attributes:
        build: the program of a number of mini-batches, of a schedule that does not flush.
        most_ahead: mini-batches that the first stage is ahead of the backward, at most.
    """

    build: Callable[[int], Program]
    most_ahead: int
    _programs: dict[int, Program] = field(default_factory=dict)

    def window(self, since: int, remaining: int) -> Window:
        """A window.

        Args:
            since: mini-batches that went backward since the pipeline was empty.
            remaining: mini-batches that follow it; :attr:`most_ahead` stands for any larger number.

        Returns:
            The window; its number is at most ``since``.
        """
        before, after = min(since, self.most_ahead), min(remaining, self.most_ahead)
        return Window(self._program(before + 1 + after), before)

    def _program(self, count: int) -> Program:
        if count not in self._programs:
            self._programs[count] = self.build(count)
        return self._programs[count]


def most_ahead(stages: StageGraph) -> int:
    """Mini-batches that the deepest stage is ahead of its backward, once the pipeline is full."""
    return max(in_flight_units(stages, [1] * stages.num_stages).values()) - 1


def version_differences(window: Window) -> dict[int, int]:
    """Stage -> updates of its parameters between the forward and the backward of a mini-batch.

    Of the mini-batch that goes backward in the window. While the pipeline fills these are fewer
    than its depth makes them: the forwards of the first window all meet the first parameters.
    Source: PipeOptim (arXiv 2312.00839), section on weight prediction, whose ``s = D - rank - 1``
    is the steady value of a chain.

    Args:
        window: of any run.
    """
    found: dict[int, int] = {}
    for actions in window.program.actions:
        updates, began = 0, dict[int, int]()
        for action in actions:
            updates += action.kind is Kind.STEP
            if action.microbatch != window.number or action.stage < 0:
                continue
            if action.kind is Kind.FORWARD:
                began[action.stage] = updates
            elif action.kind is Kind.BACKWARD:
                found[action.stage] = updates - began[action.stage]
    return dict(sorted(found.items()))
