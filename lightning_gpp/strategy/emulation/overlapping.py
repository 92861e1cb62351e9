"""The pace of an emulated pipeline that does not drain, beside the simulated one.

Mini-batches overlap, so that none of them has a duration of its own: what counts is by how much
each one ends after the one before it, while the pipeline is full. A mini-batch ends when the last
rank is through with its window (:mod:`lightning_gpp.schedule.windows`). The simulation is that of
as many mini-batches in a row, and the same windows count.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lightning_gpp.planner import Plan, PlanRequest, plan_graph
from lightning_gpp.runtime.emulation import SlipReport
from lightning_gpp.schedule import Kind, Program, most_ahead
from lightning_gpp.simulate import ProgramCosts, simulate
from lightning_gpp.simulate.engine.message_costs import compute_s
from lightning_gpp.strategy.emulation.emulation_report import (
    EmulatedStep,
    EmulationReport,
    emulation_report,
)

MOST_SIMULATED = 256
"""Mini-batches that are simulated at most: a full pipeline only repeats itself."""


def overlapping_report(
    ranks: Sequence[Sequence[EmulatedStep]],
    plan: Plan,
    request: PlanRequest,
    costs: ProgramCosts,
    *,
    time_scale: float,
    is_shape_only: bool = False,
) -> EmulationReport | None:
    """The report of the longest run between two drains; None where nothing was trained on.

    Args:
        ranks: the windows of every rank, all equally many.
        plan: what ran.
        request: the question that it answers.
        costs: of its program on the emulated cluster.
        time_scale: real seconds that an emulated second took.
        is_shape_only: whether tensors had no numbers.
    """
    windows = longest_run(list(zip(*ranks, strict=True)))
    if not windows:
        return None
    graph = plan_graph(plan, request.graph)
    ahead, count = most_ahead(graph.stages), len(windows)
    program = graph.program(min(count, MOST_SIMULATED), schedule=request.schedule, check=False)
    if count == 1:  # the policy drains the pipeline after every mini-batch
        return emulation_report(
            ranks,
            num_microbatches=1,
            predicted_s=simulate(program, costs).step_s,
            time_scale=time_scale,
            kinds=request.cluster.kinds,
            is_shape_only=is_shape_only,
        )
    ends_s = [max(part.end_s for part in parts) for parts in windows]
    counted = counted_windows(count, ahead)
    predicted_s = paces(simulated_ends(program, costs), ahead)
    return EmulationReport(
        paces([min(part.start_s for part in windows[0]), *ends_s], ahead),
        SlipReport(tuple(slip for w in counted for part in windows[w] for slip in part.slips)),
        sum(predicted_s) / len(predicted_s),
        time_scale,
        len(ranks),
        tuple(request.cluster.kinds),
        is_shape_only=is_shape_only,
        bound_s=busiest_s(program, costs),
    )


def longest_run(
    windows: Sequence[tuple[EmulatedStep, ...]],
) -> Sequence[tuple[EmulatedStep, ...]]:
    """The windows of the longest run in which the pipeline did not drain, the first such one."""
    begins = [number for number, parts in enumerate(windows) if parts[0].since == 0]
    runs = [windows[first:last] for first, last in pairwise([*begins, len(windows)])]
    return max(runs, key=len, default=())


def counted_windows(count: int, ahead: int) -> range:
    """Of the windows of a run those that are neither of its filling nor of its draining.

    The pipeline is full once it has filled and gone round once; of a run that is too short for that
    more windows count.

    Args:
        count: windows of the run.
        ahead: mini-batches that its deepest stage is ahead.

    >>> counted_windows(20, 3), counted_windows(8, 3), counted_windows(3, 3)
    (range(8, 17), range(4, 5), range(0, 3))
    """
    for first in (2 * (ahead + 1), ahead + 1):
        if first < count - ahead:
            return range(first, count - ahead)
    return range(count)


def paces(ends_s: Sequence[float], ahead: int) -> tuple[float, ...]:
    """By how much the mini-batches that count ended after the one before them.

    Args:
        ends_s: when the run began, and the end of each of its mini-batches.
        ahead: mini-batches that the deepest stage is ahead.
    """
    counted = counted_windows(len(ends_s) - 1, ahead)
    return tuple(ends_s[window + 1] - ends_s[window] for window in counted)


def simulated_ends(program: Program, costs: ProgramCosts) -> list[float]:
    """When a simulated run begins, and when each of its mini-batches ends."""
    ends_s = [0.0] * (program.num_minibatches + 1)
    for task in simulate(program, costs).tasks:
        if task.device is None or task.action is None or task.action.kind is not Kind.BACKWARD:
            continue
        number = program.minibatch(task.action) + 1
        ends_s[number] = max(ends_s[number], task.end_s)
    return ends_s


def busiest_s(program: Program, costs: ProgramCosts) -> float:
    """Seconds of the computations of a mini-batch on the device that has most of them."""
    return max(
        sum(
            compute_s(costs, action)
            for action in actions
            if action.kind.is_compute and program.minibatch(action) == 0
        )
        for actions in program.actions
    )
