"""Joins the emulated ranks of this host, and paces their training steps.

A training step ends, for each rank, when its part of the program is over. What is between steps
(data, hooks, the optimizer, logging) takes no emulated time, and neither do evaluations.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

from lightning_gpp.emulation.rank import EmulatedRank, EmulatedSums, EmulatedTransport
from lightning_gpp.emulation.real_time import RealTime
from lightning_gpp.emulation.report import EmulationReport, emulation_report
from lightning_gpp.emulation.shared import EmulatedClock, EmulatedStep, SharedReservations
from lightning_gpp.planner import Plan, PlanRequest, plan_graph
from lightning_gpp.planner.step_time.pipeline_run import num_microbatches
from lightning_gpp.runtime.executor import Executor
from lightning_gpp.runtime.waits import Waits
from lightning_gpp.schedule import Program
from lightning_gpp.simulate.plan_costs import program_costs, simulate_plan
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


_MEMORY = Path("/dev/shm")

START_S, START_RANK_S = 5e-3, 1e-3
"""Real seconds from rank 0's word to the beginning of a step, and more for each rank, as they share
this machine's cores, for all to hear it."""


class Emulation(RealTime):
    """The emulated devices of a run, on one rank.

    Args:
        planned: rank 0: what runs, and the question that it answers, with the emulated cluster;
            emulated time begins now.
        scale: real seconds that an emulated second takes; None to choose it.
        executor: of this rank.
        control: between the ranks.
        waits: of this rank.
    """

    def __init__(
        self,
        planned: tuple[Plan, PlanRequest] | None,
        scale: float | None,
        executor: Executor,
        control: Any,
        waits: Waits,
    ) -> None:
        begun = None
        if planned is not None:
            costs = program_costs(*planned)
            scale = scale or plan_time_scale(*planned, costs)
            folder = _MEMORY if os.access(_MEMORY, os.W_OK) else None
            file, path = tempfile.mkstemp(prefix="lightning_gpp_channels_", dir=folder)
            os.close(file)
            begun = *planned, costs, scale, time.monotonic_ns(), path
        told = control.share(begun, "waiting for rank 0 to begin emulated time")
        self._plan, self._request, self._costs, self.time_scale, origin_ns, path = told
        self._executor = executor
        self._reservations = SharedReservations(path)
        control.gather(None, "opening the channels of the emulated cluster")
        if control.is_leader:
            Path(path).unlink()
        clock = EmulatedClock(origin_ns, self.time_scale, sleep=waits.sleep)
        inner = executor.transport
        self._rank = rank = EmulatedRank(clock, self._reservations, self._costs)
        self._control, self._steps = control, list[EmulatedStep]()
        self._transport = EmulatedTransport(inner, rank, executor.rank_of_device)
        self._sums = None if executor.sums is None else EmulatedSums(executor.sums, rank)
        self._units_at_a_time = plan_graph(self._plan, self._request.graph).units_at_a_time

    @contextlib.contextmanager
    def step(self, program: Program, *, is_second: bool = False) -> Iterator[None]:
        """The body runs a training program or one of its halves, at the emulated devices' pace.

        Emulated time stands still between the halves, where the user's step runs. A mini-batch that
        is too small for the plan's program runs as fast as it can.
        """
        if program.num_microbatches % self._units_at_a_time:
            yield
            return
        rank, executor = self._rank, self._executor
        if is_second:
            before = self._steps.pop()
            with self._control.together():
                moment_s, leader_s = self._control.share(
                    (self._next_start_s(), rank.cursor_s), "waiting for rank 0 to go on with a step"
                )
            # Time goes on as if it had stood still until rank 0 does, before which nobody does.
            rank.clock.go_back(max(0.0, moment_s - leader_s))
            rank.wait_until(max(rank.cursor_s, leader_s))
            start_s, slip_s = before.start_s, before.slip_s
        else:
            start_s, slip_s = self._begin(), 0.0
        rank.slip_s = slip_s
        inner = executor.transport, executor.sums
        executor.pace, executor.transport = rank, self._transport
        executor.sums = self._sums or executor.sums
        try:
            yield
        finally:
            executor.pace = None
            executor.transport, executor.sums = inner
        num = program.num_microbatches
        self._steps.append(EmulatedStep(start_s, rank.cursor_s, num, rank.slip_s))

    def _begin(self) -> float:
        """All ranks: waits for the moment at which a step begins, once all have ended theirs."""
        with self._control.together():
            start_s: float = self._control.combined(
                self._rank.cursor_s,
                lambda ends_s: max(self._next_start_s(), *ends_s),
                "waiting for all ranks to end a step",
            )
        self._rank.wait_until(start_s)
        return start_s

    def _next_start_s(self) -> float:
        """Rank 0: the moment by which all ranks have heard of it."""
        real_s = START_S + START_RANK_S * self._control.num_ranks
        clock = self._rank.clock
        return clock.now_s() + float(real_s) / clock.time_scale

    def report(self) -> EmulationReport | None:
        """All ranks: on rank 0 what the steps took; None elsewhere, or if there were none."""
        ranks = self._control.gather(self._steps, "gathering what the emulated steps took")
        if not ranks:
            return None
        plan, request = self._plan, self._request
        return emulation_report(
            ranks,
            num_microbatches=num_microbatches(plan, request),
            predicted_s=simulate_plan(plan, request, self._costs).step_s,
            time_scale=self.time_scale,
            kinds=request.cluster.kinds,
        )

    def close(self) -> None:
        """Lets go of the channels."""
        self._reservations.close()
