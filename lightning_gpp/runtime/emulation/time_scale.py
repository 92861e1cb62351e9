"""How slowly emulated time has to pass so that real work fits into it."""

from __future__ import annotations

from lightning_gpp.runtime.emulation.durations import Durations
from lightning_gpp.schedule import Program
from lightning_gpp.simulate.program_costs import ProgramCosts

WAKE_S = 10e-3
"""Real seconds that a short action gets at least."""

RANK_S = 0.7e-3
"""Real seconds more for each rank: they share the interpreter, and may all wake at once."""

ACTION_S = 0.12e-3
"""Real seconds that the interpreter works for an action without computing anything."""

LOAD = 0.4
"""Part of the time in which the interpreter may be at work."""

SHORT = 0.02
"""Compute actions below this part of the longest one are not looked at: they slip a little."""


def choose_time_scale(program: Program, costs: ProgramCosts) -> float:
    """A scale at which threads that compute shapes alone keep up with a program.

    The shortest forward or backward that matters gets time for all ranks to do something, and all
    actions together leave the interpreter idle most of the time.

    Raises:
        ValueError: nothing in the program takes any time.
    """
    seconds = [s for stage in costs.stages for s in (stage.forward_s, stage.backward_s) if s > 0]
    durations = Durations(program, costs, device=0)
    busy_s = [
        sum(durations.compute_s(action) for action in actions if action.kind.is_compute)
        for actions in program.actions
    ]
    if not seconds or not any(busy_s):
        raise ValueError("no stage of the program takes any time; give time_scale yourself")
    shortest_s = min(s for s in seconds if s >= SHORT * max(seconds))
    num_actions = sum(map(len, program.actions))
    return max(
        (WAKE_S + RANK_S * len(program.actions)) / shortest_s,
        num_actions * ACTION_S / LOAD / max(busy_s),
    )
