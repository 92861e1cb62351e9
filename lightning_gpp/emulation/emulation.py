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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_gpp.emulation.clock import EmulatedClock, EmulatedStep, EmulatedSteps
from lightning_gpp.emulation.rank import EmulatedRank, EmulatedSums, EmulatedTransport
from lightning_gpp.emulation.real_time import RealTime, Resumption
from lightning_gpp.emulation.report import (
    EmulationReport,
    emulation_report,
    overlapping_report,
)
from lightning_gpp.emulation.reservations import SharedReservations
from lightning_gpp.emulation.time_scale import process_time_scale
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


class Emulation(RealTime[Program]):
    """The emulated devices of a run, as one rank sees them; all ranks make theirs together.

    Args:
        setup: rank 0's; see :func:`begin_emulation`.
        executor: of this rank.
        control: between the ranks.
        waits: of this rank.
    """

    def __init__(self, setup: Setup | None, executor: Executor, control: Any, waits: Waits) -> None:
        setup = control.share(setup, "waiting for rank 0 to begin emulated time")
        assert setup is not None
        self._setup, self._executor, self.time_scale = setup, executor, setup.time_scale
        self._reservations = SharedReservations(setup.path)
        control.gather(None, "opening the channels of the emulated cluster")
        if control.is_leader:
            Path(setup.path).unlink()
        clock = EmulatedClock(setup.origin_ns, setup.time_scale, sleep=waits.sleep)
        inner = executor.transport
        self._rank = rank = EmulatedRank(inner.rank, clock, self._reservations, setup.costs)
        self._timed = EmulatedSteps(rank, control)
        self._transport = EmulatedTransport(inner, rank, executor.rank_of_device)
        self._sums = None if executor.sums is None else EmulatedSums(executor.sums, rank)
        self._units_at_a_time = plan_graph(setup.plan, setup.request.graph).units_at_a_time
        self._num_unpaced = 0
        self._was_away = False

    @contextlib.contextmanager
    def step(self, work: Program, *, is_second: bool = False) -> Iterator[None]:
        """The body runs a training program or one of its halves, at the emulated devices' pace.

        Emulated time stands still between the halves, where the user's step runs. A mini-batch that
        is too small for the plan's program, and a call of the forward beside steps that overlap,
        run as fast as they can.
        """
        if not work.schedule.flushes:
            self.leave()
            yield
        elif work.num_microbatches % self._units_at_a_time:
            self._num_unpaced += not is_second
            yield
        else:
            part = self._timed.part(work.num_microbatches, is_second=is_second)
            with part, self._messages():
                yield

    @contextlib.contextmanager
    def window(self, since: int, resumption: Resumption | None) -> Iterator[None]:
        """The body runs a window of a pipeline that does not drain, at the devices' pace."""
        rank = self._rank
        if since == 0:
            self._timed.begin()
        elif resumption is not None:
            self._timed.resume(resumption)
        rank.take_slips()
        start_s = rank.cursor_s
        with self._messages():
            yield
        slips = rank.take_slips().slips
        self._timed.steps.append(EmulatedStep(start_s, rank.cursor_s, 1, slips, since))

    def resumption(self, since: int) -> Resumption | None:
        """Rank 0: how emulated time goes on before a window; None where it did not stand still."""
        was_away, self._was_away = self._was_away, False
        is_still = bool(since) and was_away
        return self._timed.resumption() if is_still else None

    @contextlib.contextmanager
    def _messages(self) -> Iterator[None]:
        """Messages and sums in the body go at the emulated devices' pace."""
        executor = self._executor
        inner = executor.transport, executor.sums
        executor.pace, executor.transport = self._rank, self._transport
        executor.sums = self._sums or executor.sums
        try:
            yield
        finally:
            executor.pace = None
            executor.transport, executor.sums = inner

    def leave(self) -> None:
        """Something runs that takes no emulated time."""
        self._was_away = True

    def report(self) -> EmulationReport | None:
        """All ranks: on rank 0 what the steps took; None elsewhere, or if there were none."""
        ranks, setup = self._timed.gathered(), self._setup
        if not ranks:
            return None
        plan, request, costs = setup.plan, setup.request, setup.costs
        told = {
            "time_scale": setup.time_scale,
            "kinds": request.cluster.kinds,
            "num_unpaced": self._num_unpaced,
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
        self._reservations.close()


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
        scale = process_time_scale(plan, request, costs, "meta" if is_shape_only else "cpu")
    folder = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    file, path = tempfile.mkstemp(prefix="lightning_gpp_channels_", dir=folder)
    os.close(file)
    return Setup(plan, request, costs, scale, time.monotonic_ns(), path, is_shape_only)
