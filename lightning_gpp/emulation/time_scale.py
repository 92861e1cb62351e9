"""How slowly emulated time has to pass so that real work fits into it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from itertools import repeat

from lightning_gpp.planner import Plan, PlanRequest, plan_graph
from lightning_gpp.planner.step_time.pipeline_run import num_microbatches
from lightning_gpp.schedule import Program
from lightning_gpp.simulate.program_costs import ProgramCosts, compute_s

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

MARGIN = 1.5
"""Real work gets so much more time than was measured: processes disturb each other."""


def choose_time_scale(
    program: Program,
    costs: ProgramCosts,
    real_s: Iterable[tuple[float, float]] = repeat((0.0, 0.0)),
) -> float:
    """A scale at which ranks of this machine keep up with a program.

    Every forward and backward that matters gets time for its own work and for all ranks to do
    something, the backward of a stage with replicas time for all of their sums, and all actions
    together leave the interpreter idle most of the time.

    Args:
        program: of the plan.
        costs: of the program on the emulated cluster.
        real_s: of every stage what its forward and backward really take.
    """
    sums_s: defaultdict[int, float] = defaultdict(float)
    for bucket in costs.buckets:
        group = program.reduce_groups[bucket.group]
        if group.stage is not None:
            sums_s[group.stage] += SUM_S * len(group.devices)
    least_s = WAKE_S + RANK_S * len(program.actions)
    pairs: list[tuple[float, float]] = []
    for number, (stage, (forward_s, backward_s)) in enumerate(zip(costs.stages, real_s)):
        of_sums_s = sums_s[program.replica(number).stage] / BURST
        pairs += [
            (least_s + forward_s, stage.forward_s),
            (max(least_s, of_sums_s) + backward_s, stage.backward_s),
        ]
    busy_s = max(
        sum(compute_s(costs, action) for action in actions if action.kind.is_compute)
        for actions in program.actions
    )
    actions_s = sum(map(len, program.actions)) * ACTION_S + sum(sums_s.values())
    least_s = SHORT * max(emulated_s for _, emulated_s in pairs)
    slowest = (real_s / emulated_s for real_s, emulated_s in pairs if emulated_s > least_s)
    return max(*slowest, actions_s / LOAD / busy_s)


def plan_time_scale(plan: Plan, request: PlanRequest, costs: ProgramCosts) -> float:
    """Real seconds per emulated second for ranks that are processes of this machine.

    Args:
        plan: what runs.
        request: the question that it answers, with the costs of CPUs, too.
        costs: of its program on the emulated cluster.
    """
    program = plan_graph(plan, request.graph).program(
        num_microbatches(plan, request), schedule=request.schedule, check=False
    )
    sharing = max(1.0, len(program.actions) / (os.cpu_count() or 1))
    unit_size = request.minibatch_size / num_microbatches(plan, request)
    real_s = []
    for number in range(program.num_stages):
        stage, forward_s, backward_s = program.replica(number).stage, 0.0, 0.0
        if stage < plan.num_stages:  # else it takes outputs of replicas
            found = request.costs.at(unit_size * program.multiple(number), "cpu").operators
            real = [found[name] for name in plan.stages[stage].operators]
            forward_s = MARGIN * sharing * sum(each.forward_s for each in real)
            backward_s = MARGIN * sharing * sum(each.backward_s for each in real)
            if plan.stages[stage].recompute:
                backward_s += forward_s
        real_s.append((forward_s, backward_s))
    return choose_time_scale(program, costs, real_s)
