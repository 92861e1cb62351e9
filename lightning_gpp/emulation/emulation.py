"""Emulated devices of a pipeline: joins the ranks of this host, and paces their training steps.

A training step ends, for each rank, when its part of the program is over. What is between steps
(data, hooks, the optimizer, logging) takes no emulated time, and neither do evaluations.

A pipeline that does not drain has no moment at which all ranks begin a step: there is one when it
begins to fill, and from then on every rank goes on where its window before has ended. What it
really does between two windows has to fit into the emulated time of the next, or slips. Emulated
time stands still for evaluations: the clocks of all ranks go back by what they took.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from lightning_gpp.emulation.clock import EmulatedClock
from lightning_gpp.emulation.rank import EmulatedRank
from lightning_gpp.emulation.real_time import RealTime, Resumption
from lightning_gpp.emulation.report import (
    EmulatedStep,
    EmulationReport,
    emulation_report,
    overlapping_report,
)
from lightning_gpp.emulation.reservations import SharedReservations
from lightning_gpp.emulation.shapes import is_one_tensor
from lightning_gpp.emulation.steps import EmulatedSteps, RanksTogether
from lightning_gpp.emulation.sums import EmulatedSums
from lightning_gpp.emulation.time_scale import process_time_scale
from lightning_gpp.emulation.transport import EmulatedTransport
from lightning_gpp.planner import Plan, PlanRequest, plan_graph
from lightning_gpp.planner.step_time.pipeline_run import num_microbatches
from lightning_gpp.runtime.executor import Executor
from lightning_gpp.runtime.waits import Waits
from lightning_gpp.schedule import Program
from lightning_gpp.simulate import ProgramCosts
from lightning_gpp.simulate.plan_costs import program_costs, simulate_plan

_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Setup:
    """What all ranks of an emulation agree on.

    Attributes:
        plan: what runs.
        request: the question that it answers, with the emulated cluster.
        costs: what its program costs there.
        time_scale: real seconds that an emulated second takes.
        origin_ns: when emulated time is zero, on the clock of this host.
        path: of the file with the channels; gone once all ranks have opened it.
        is_shape_only: whether tensors have no numbers.
    """

    plan: Plan
    request: PlanRequest
    costs: ProgramCosts
    time_scale: float
    origin_ns: int
    path: str
    is_shape_only: bool = False


@dataclass
class Emulation(RealTime[Program]):
    """The emulated devices of a run, as one rank sees them.

    Attributes:
        setup: what the ranks agreed on.
        executor: of this rank.
        timed: the steps of this rank.
        units_at_a_time: the least number of smallest micro-batches that the plan's program takes.
        num_unpaced: training steps that ran as fast as they could.
        was_away: whether rank 0 did something since the last training step for which emulated
            time stands still, in a pipeline that does not drain.
    """

    setup: Setup
    executor: Executor
    timed: EmulatedSteps
    rank: EmulatedRank
    transport: EmulatedTransport
    sums: EmulatedSums | None
    reservations: SharedReservations
    units_at_a_time: int
    num_unpaced: int = 0
    was_away: bool = False

    @classmethod
    def join(
        cls,
        setup: Setup | None,
        executor: Executor,
        control: RanksTogether,
        waits: Waits,
    ) -> Emulation:
        """All ranks together.

        Args:
            setup: rank 0's.
            executor: of this rank.
            control: between the ranks.
            waits: of this rank.
        """
        setup = control.share(setup, "waiting for rank 0 to begin emulated time")
        assert setup is not None
        reservations = SharedReservations(setup.path, timeout_s=executor.timeout_s)
        control.gather(None, "opening the channels of the emulated cluster")
        if control.is_leader:
            Path(setup.path).unlink()
        clock = EmulatedClock(setup.origin_ns, setup.time_scale, sleep=waits.sleep)
        transport = executor.transport
        rank = EmulatedRank(transport.rank, clock, reservations, lambda _: setup.costs)
        return cls(
            setup,
            executor,
            EmulatedSteps(rank, control),
            rank,
            EmulatedTransport(transport, rank, executor.rank_of_device),
            None if executor.sums is None else EmulatedSums(executor.sums, rank),
            reservations,
            plan_graph(setup.plan, setup.request.graph).units_at_a_time,
        )

    @property
    def time_scale(self) -> float:
        """Real seconds that an emulated second takes."""
        return self.setup.time_scale

    def step(self, work: Program, *, is_second: bool = False) -> AbstractContextManager[int]:
        """The body runs a training program or one of its halves, at the emulated devices' pace.

        Emulated time stands still between the halves, where the user's step runs. It gets for how
        many real nanoseconds that was. A mini-batch that is too small for the plan's program, and a
        call of the forward beside steps that overlap, run as fast as they can.
        """
        if not work.schedule.flushes:
            self.leave()
            return nullcontext(0)
        if work.num_microbatches % self.units_at_a_time:
            self.num_unpaced += not is_second
            return nullcontext(0)
        return self._step(work.num_microbatches, is_second)

    @contextlib.contextmanager
    def _step(self, count: int, is_second: bool) -> Iterator[int]:
        with self.timed.part(count, is_second=is_second) as still_ns, self.messages():
            yield still_ns

    @contextlib.contextmanager
    def window(self, since: int, resumption: Resumption | None) -> Iterator[None]:
        """The body runs a window of a pipeline that does not drain, at the devices' pace."""
        if since == 0:
            self.timed.begin()
        elif resumption is not None:
            self.rank.clock.go_back(max(0.0, resumption.moment_s - resumption.leader_s))
            self.rank.wait_until(self.rank.cursor_s)
        self.rank.take_slips()
        start_s = self.rank.cursor_s
        with self.messages():
            yield
        slips = self.rank.take_slips().slips
        self.timed.steps.append(EmulatedStep(start_s, self.rank.cursor_s, 1, slips, since))

    def resumption(self, since: int) -> Resumption | None:
        """Rank 0: how emulated time goes on before a window; None where it did not stand still."""
        was_away, self.was_away = self.was_away, False
        if not since or not was_away:
            return None
        return Resumption(self.timed.next_start_s(), self.rank.cursor_s)

    @contextlib.contextmanager
    def messages(self) -> Iterator[None]:
        """Messages and sums in the body go at the emulated devices' pace."""
        executor = self.executor
        inner = executor.transport, executor.sums
        executor.pace, executor.transport = self.rank, self.transport
        executor.sums = self.sums or executor.sums
        try:
            yield
        finally:
            executor.pace = None
            executor.transport, executor.sums = inner

    def leave(self) -> None:
        """Something runs that takes no emulated time."""
        self.was_away = True

    def report(self) -> EmulationReport | None:
        """All ranks: on rank 0 what the steps took; None elsewhere, or if there were none."""
        ranks, setup = self.timed.gathered(), self.setup
        if not ranks:
            return None
        plan, request, costs = setup.plan, setup.request, setup.costs
        told = {
            "time_scale": setup.time_scale,
            "kinds": request.cluster.kinds,
            "num_unpaced": self.num_unpaced,
            "is_shape_only": setup.is_shape_only,
        }
        if not request.order.flushes:
            return overlapping_report(ranks, plan, request, costs, **told)
        return emulation_report(
            ranks,
            num_microbatches=num_microbatches(plan, request),
            predicted_s=simulate_plan(plan, request, costs).step_s,
            **told,
        )

    def close(self) -> None:
        """Lets go of the channels."""
        self.reservations.close()


def _works_on(plan: Plan, request: PlanRequest, is_shape_only: bool) -> str | None:
    """The kind of device that computes what stages make; None where their shapes are known."""
    if not is_shape_only:
        return "cpu"
    graph = request.graph
    edges = plan_graph(plan, graph).stages.edges
    names = {name for edge in edges for name in edge.values} | set(graph.outputs)
    return None if all(is_one_tensor(graph.values[name]) for name in names) else "meta"


def begin_emulation(
    plan: Plan, request: PlanRequest, scale: float | None, *, is_shape_only: bool
) -> Setup:
    """Rank 0: what the ranks of a run will agree on; emulated time begins now.

    Args:
        plan: what runs.
        request: the question that it answers, with the emulated cluster.
        scale: real seconds that an emulated second takes; None to choose it.
        is_shape_only: whether tensors have no numbers.
    """
    costs = program_costs(plan, request)
    if scale is None:
        program = plan_graph(plan, request.graph).program(
            num_microbatches(plan, request), schedule=request.schedule, check=False
        )
        works_on = _works_on(plan, request, is_shape_only)
        scale = process_time_scale(plan, request, program, costs, works_on)
    folder = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    file, path = tempfile.mkstemp(prefix="lightning_gpp_channels_", dir=folder)
    os.close(file)
    return Setup(plan, request, costs, scale, time.monotonic_ns(), path, is_shape_only)
