"""How slowly emulated time has to pass so that real work fits into it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

from lightning_gpp.planner import Plan, PlanRequest
from lightning_gpp.planner.step_time.pipeline_run import num_microbatches
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


MARGIN = 1.5
"""Real work gets so much more time than was measured: processes disturb each other."""

BETWEEN_S = 8e-3
"""Real seconds that a process works between two steps that overlap: hooks, logs, the optimizer."""


def process_time_scale(
    plan: Plan, request: PlanRequest, program: Program, costs: ProgramCosts, real_kind: str | None
) -> float:
    """Real seconds per emulated second for ranks that are processes of this machine.

    Args:
        plan: what runs.
        request: the question that it answers.
        program: of the plan.
        costs: of the program on the emulated cluster.
        real_kind: kind of the device that really computes, whose costs the request has (``meta``
            takes its time too: for each operator that it is asked the shape of); None where
            nothing is computed.
    """
    least = choose_time_scale(program, costs)
    sharing = max(1.0, len(program.actions) / (os.cpu_count() or 1))
    if not program.schedule.flushes:
        least += sharing * BETWEEN_S / _short_s(costs)
    if real_kind is None:
        return least
    return max(least, MARGIN * sharing * _slowness(plan, request, program, costs, real_kind))


def _short_s(costs: ProgramCosts) -> float:
    """Emulated seconds of the shortest forward that matters; it follows what is between steps."""
    forwards_s = [stage.forward_s for stage in costs.stages if stage.forward_s > 0]
    longest_s = max(forwards_s, default=0.0)
    return min(
        (seconds for seconds in forwards_s if seconds >= SHORT * longest_s), default=math.inf
    )


def _slowness(
    plan: Plan, request: PlanRequest, program: Program, costs: ProgramCosts, real_kind: str
) -> float:
    """The most by which a forward or backward takes longer really than emulated."""
    unit_size = request.minibatch_size / num_microbatches(plan, request)
    pairs: list[tuple[float, float]] = []
    for number in range(program.num_stages):
        stage = program.replica(number).stage
        if stage == plan.num_stages:  # takes the outputs of replicas
            continue
        share = unit_size * program.multiple(number)
        found = request.costs.at(share, real_kind).operators
        real = [found[name] for name in plan.stages[stage].operators]
        forward_s = sum(each.forward_s for each in real)
        backward_s = sum(each.backward_s for each in real)
        if plan.stages[stage].recompute:
            backward_s += forward_s
        pairs += [
            (forward_s, costs.stages[number].forward_s),
            (backward_s, costs.stages[number].backward_s),
        ]
    return most_slowly(pairs)


def most_slowly(pairs: Iterable[tuple[float, float]]) -> float:
    """The most real seconds that anything takes per emulated one; what is short is left out.

    Args:
        pairs: real and emulated seconds.
    """
    pairs = list(pairs)
    longest_s = max((emulated_s for _, emulated_s in pairs), default=0.0)
    return max(
        (real_s / emulated_s for real_s, emulated_s in pairs if emulated_s > SHORT * longest_s),
        default=0.0,
    )
