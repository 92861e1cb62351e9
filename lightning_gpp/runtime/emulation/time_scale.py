"""How slowly emulated time has to pass so that real work fits into it."""

from __future__ import annotations

from lightning_gpp.schedule import Program
from lightning_gpp.simulate.engine.message_costs import compute_s
from lightning_gpp.simulate.program_costs import ProgramCosts

WAKE_S = 10e-3
"""Real seconds that a short action gets at least."""

RANK_S = 0.7e-3
"""Real seconds more for each rank: they share the interpreter, and may all wake at once."""

ACTION_S = 0.12e-3
"""Real seconds that the interpreter works for an action without computing anything."""

SUM_S = 0.5e-3
"""Real seconds that the interpreter works for a rank's part in a sum of gradients."""

LOAD = 0.4
"""Part of the time in which the interpreter may be at work."""

BURST = 0.7
"""The same while the sums of a stage are begun."""

SHORT = 0.02
"""Compute actions below this part of the longest one are not looked at: they slip a little."""


def choose_time_scale(program: Program, costs: ProgramCosts) -> float:
    """A scale at which threads that compute shapes alone keep up with a program.

    The shortest forward or backward that matters gets time for all ranks to do something, the
    backward of a stage with replicas time for all of their sums, and all actions together leave the
    interpreter idle most of the time.

    Raises:
        ValueError: nothing in the program takes any time.
    """
    seconds = [s for stage in costs.stages for s in (stage.forward_s, stage.backward_s) if s > 0]
    busy_s = [
        sum(compute_s(costs, action) for action in actions if action.kind.is_compute)
        for actions in program.actions
    ]
    if not seconds or not any(busy_s):
        raise ValueError("no stage of the program takes any time; give time_scale yourself")
    shortest_s = min(s for s in seconds if s >= SHORT * max(seconds))
    sums_s = _sums_s(program, costs)
    backward_s = {
        program.replica(number).stage: max(stage.backward_s, shortest_s)
        for number, stage in enumerate(costs.stages)
    }
    actions_s = sum(map(len, program.actions)) * ACTION_S
    return max(
        (WAKE_S + RANK_S * len(program.actions)) / shortest_s,
        (actions_s + sum(sums_s.values())) / LOAD / max(busy_s),
        *(work_s / BURST / backward_s[stage] for stage, work_s in sums_s.items()),
    )


def _sums_s(program: Program, costs: ProgramCosts) -> dict[int, float]:
    """Stage of the plan -> real seconds of the sums of all its replicas."""
    found: dict[int, float] = {}
    for bucket in costs.buckets:
        group = program.reduce_groups[bucket.group]
        if group.stage is not None:
            work_s = SUM_S * len(group.devices)
            found[group.stage] = found.get(group.stage, 0.0) + work_s
    return found
