"""What emulated training steps took, beside what the simulator predicts for them.

Where the pipeline does not drain mini-batches overlap, so that none of them has a duration of its
own: what counts is by how much each one ends after the one before it, while the pipeline is full. A
mini-batch ends when the last rank is through with its window
(:mod:`lightning_gpp.schedule.windows`). The simulation is that of as many mini-batches in a row,
and the same windows count.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lightning_gpp.common.text_table import wrapped
from lightning_gpp.common.units_of_measure import number_text, seconds_text
from lightning_gpp.emulation.clock import EmulatedStep, SlipReport
from lightning_gpp.emulation.time_scale import busiest_s
from lightning_gpp.planner import Plan, PlanRequest, plan_graph
from lightning_gpp.schedule import Kind, Program, most_ahead
from lightning_gpp.simulate import ProgramCosts, simulate


@dataclass(frozen=True, slots=True)
class EmulationReport:
    """A run on emulated devices. All but the scale is in emulated seconds.

    The first step is left out where there are more: torch warms up in it. Where the pipeline does
    not drain the steps in which it fills or drains are left out, too.

    Attributes:
        step_s: of every whole mini-batch; of those that overlap by how much each ended after the
            one before it.
        slip: of the step whose time is the median; of all steps where they overlap.
        predicted_s: of the same program on the same costs, simulated.
        time_scale: real seconds that an emulated second took.
        num_devices: of the cluster.
        kinds: of its devices.
        num_unpaced: mini-batches that ran as fast as they could, as they were too small for the
            plan's program.
        is_shape_only: whether tensors had no numbers.
        bound_s: how long a mini-batch keeps the busiest device, where they overlap: no pipeline is
            faster; None where the pipeline drains after each.
    """

    step_s: tuple[float, ...]
    slip: SlipReport
    predicted_s: float
    time_scale: float
    num_devices: int
    kinds: tuple[str, ...]
    num_unpaced: int = 0
    is_shape_only: bool = False
    bound_s: float | None = None

    @property
    def typical_s(self) -> float:
        """The step in the middle; of steps that overlap the mean, which is what a run takes."""
        typical = statistics.median_low if self.bound_s is None else statistics.fmean
        return typical(self.step_s)

    @property
    def error(self) -> float:
        """By which part the emulated step was longer than predicted."""
        return self.typical_s / self.predicted_s - 1

    def metrics(self) -> dict[str, float]:
        """The numbers for loggers."""
        bound = {} if self.bound_s is None else {"busiest_device_s": self.bound_s}
        return {
            "emulated_step_s": self.typical_s,
            "emulated_slip_s": self.slip.total_s
            / (1 if self.bound_s is None else len(self.step_s)),
            "predicted_step_s": self.predicted_s,
            **bound,
        }

    def text(self, max_width: int = 100) -> str:
        """A few lines for a person, of so many columns."""
        low, high = seconds_text(min(self.step_s)), seconds_text(max(self.step_s))
        percent = f"{100 * round(self.error, 3) + 0.0:+.1f} %"  # never -0.0
        kind = "median" if self.bound_s is None else "mean"
        count = f"{kind} of {len(self.step_s)} steps, {low} to {high}"
        lines = [
            f"Emulated on {self.num_devices} devices ({', '.join(self.kinds)}): "
            f"{seconds_text(self.typical_s)} per step "
            f"({count if len(self.step_s) > 1 else 'one step'}), {percent} against the "
            f"{seconds_text(self.predicted_s)} that were predicted.",
            *self._slip_lines(),
            f"An emulated second took {number_text(self.time_scale)} real ones. Reading data, the "
            "optimizer and what else is between steps take no emulated time.",
        ]
        if self.num_unpaced:
            lines.append(
                f"{self.num_unpaced} mini-batches were smaller than what the replicas take at a "
                "time: they were trained on, but not emulated."
            )
        if self.is_shape_only:
            lines.append(
                "Tensors had shapes and no numbers: nothing was learned, logged values are nan, "
                "and the captured graph was compared with the model by shapes alone."
            )
        return wrapped(lines, max_width)

    def _slip_lines(self) -> list[str]:
        """What slipped, and how busy the busiest device was where steps overlap."""
        if self.bound_s is None:
            return [f"In that step: {self.slip.text(self.typical_s)}."]
        return [
            f"Steps overlap: they are counted from end to end while the pipeline is full, and keep "
            f"the busiest device for {seconds_text(self.bound_s)}, "
            f"{100 * self.bound_s / self.typical_s:.1f} % of that.",
            f"In these steps: {self.slip.text(sum(self.step_s))}.",
        ]


def emulation_report(
    ranks: Sequence[Sequence[EmulatedStep]],
    *,
    num_microbatches: int,
    predicted_s: float,
    **told: Any,
) -> EmulationReport | None:
    """The report of a run; None where no whole mini-batch was trained on.

    Args:
        ranks: the steps of every rank, all equally many.
        num_microbatches: smallest micro-batches of a whole mini-batch.
        predicted_s: what a step was predicted to take.
        told: more of the report.
    """
    whole = [
        parts for parts in zip(*ranks, strict=True) if parts[0].num_microbatches == num_microbatches
    ]
    counted = whole[1:] or whole
    if not counted:
        return None
    taken_s = [max(part.end_s for part in parts) - parts[0].start_s for parts in counted]
    middle = counted[taken_s.index(statistics.median_low(taken_s))]
    slips = SlipReport(tuple(slip for part in middle for slip in part.slips))
    return EmulationReport(tuple(taken_s), slips, predicted_s, num_devices=len(ranks), **told)


MOST_SIMULATED = 256
"""Mini-batches that are simulated at most: a full pipeline only repeats itself."""


def overlapping_report(
    ranks: Sequence[Sequence[EmulatedStep]],
    plan: Plan,
    request: PlanRequest,
    costs: ProgramCosts,
    **told: Any,
) -> EmulationReport | None:
    """The report of the longest run between two drains; None where nothing was trained on.

    Args:
        ranks: the windows of every rank, all equally many.
        plan: what ran.
        request: the question that it answers.
        costs: of its program on the emulated cluster.
        told: more of the report.
    """
    windows = longest_run(list(zip(*ranks, strict=True)))
    if not windows:
        return None
    graph = plan_graph(plan, request.graph)
    ahead, count = most_ahead(graph.stages), len(windows)
    program = graph.program(min(count, MOST_SIMULATED), schedule=request.schedule, check=False)
    if count == 1:  # the policy drains the pipeline after every mini-batch
        predicted_s = simulate(program, costs).step_s
        return emulation_report(ranks, num_microbatches=1, predicted_s=predicted_s, **told)
    ends_s = [max(part.end_s for part in parts) for parts in windows]
    slips = [s for w in counted_windows(count, ahead) for part in windows[w] for s in part.slips]
    return EmulationReport(
        paces([min(part.start_s for part in windows[0]), *ends_s], ahead),
        SlipReport(tuple(slips)),
        statistics.fmean(paces(simulated_ends(program, costs), ahead)),
        num_devices=len(ranks),
        bound_s=busiest_s(program, costs) / program.num_minibatches,
        **told,
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
