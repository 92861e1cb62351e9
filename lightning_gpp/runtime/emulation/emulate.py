"""Runs a program on emulated devices, with one thread for each of them.

The executor, the transport, the messages and the sums are the real ones; only the durations are
those of the emulated cluster. Tensors may be real, or shapes alone
(:mod:`lightning_gpp.runtime.emulation.shapes`).
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch.nn import Parameter

from lightning_gpp.graph import FEED
from lightning_gpp.runtime.clock import ClockOffset
from lightning_gpp.runtime.emulation.clock import EmulatedClock
from lightning_gpp.runtime.emulation.rank import EmulatedRank
from lightning_gpp.runtime.emulation.reservations import LocalReservations
from lightning_gpp.runtime.emulation.slip import SlipReport
from lightning_gpp.runtime.emulation.sums import EmulatedSums
from lightning_gpp.runtime.emulation.time_scale import choose_time_scale
from lightning_gpp.runtime.emulation.transport import EmulatedTransport
from lightning_gpp.runtime.executor import ActionRecord, Boundary, Executor
from lightning_gpp.runtime.measured import Mark, RankRecord, RunRecord, measured_timeline
from lightning_gpp.runtime.stage_run import StageCode
from lightning_gpp.runtime.sums import ThreadSumHub, ThreadSums
from lightning_gpp.runtime.thread_transport import ThreadHub
from lightning_gpp.runtime.value_pieces import Cutter
from lightning_gpp.schedule import Program
from lightning_gpp.simulate import SpanKind, Timeline, TimelineStage
from lightning_gpp.simulate.program_costs import ProgramCosts

START_S = 0.05
"""Real seconds for all threads to start before emulated time begins."""

SWITCH_S = 1e-3
"""Real seconds after which a thread lets others run; Python's own 5 ms keep them waiting long."""


@dataclass(frozen=True, slots=True)
class RankWork:
    """What one rank runs.

    Attributes:
        stages: code of its stages, by their id in the plan.
        parameters: by canonical name.
        boundary: the user's step, on the rank of the loss.
        step: the optimizer's step.
    """

    stages: Mapping[int, StageCode]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    boundary: Boundary | None = None
    step: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class EmulatedRun:
    """What an emulation measured. All but ``wall_s`` is in emulated seconds.

    Attributes:
        program: what ran.
        costs: with these costs.
        step_s: seconds of a step: from the start to the end of the only one; of several the
            seconds by which the last one ended after the one before it.
        timeline: of the last step, measured.
        slip: what did not fit its emulated time in the last step.
        time_scale: real seconds that an emulated second took.
        wall_s: real seconds of all steps.
    """

    program: Program
    costs: ProgramCosts
    step_s: float
    timeline: Timeline
    slip: SlipReport
    time_scale: float
    wall_s: float

    def __str__(self) -> str:
        return (
            f"emulated step {self.step_s:.6g} s at {self.time_scale:.3g} real seconds per emulated "
            f"second; {self.slip.text(self.step_s)}"
        )


@dataclass(slots=True)
class _Recorded:
    """What a rank did in each step: the record, the slips, and when it ended."""

    records: list[RankRecord] = field(default_factory=list)
    slips: list[SlipReport] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)


def emulate(
    program: Program,
    costs: ProgramCosts,
    work: Sequence[RankWork],
    *,
    unit_sizes: Sequence[int],
    output_names: tuple[str, ...] = (),
    cutter: Cutter | None = None,
    num_steps: int = 1,
    time_scale: float | None = None,
    timeout_s: float = 1800.0,
) -> EmulatedRun:
    """Trains some steps of a program on emulated devices; rank ``d`` is device ``d``.

    Args:
        program: what to run.
        costs: what it costs on the emulated cluster.
        work: of every device of the program.
        unit_sizes: samples of each of the smallest micro-batches.
        output_names: values that the model returns.
        cutter: cuts and joins values where stages take other numbers of samples.
        num_steps: how many steps; a mini-batch is read when the step before it is over.
        time_scale: real seconds that an emulated second takes; chosen so that the work of shapes
            fits if not given.
        timeout_s: limit of every wait, in real seconds.

    Raises:
        ValueError: the costs are not of this program, or a number makes no sense.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    if len(work) != len(program.actions):
        raise ValueError(
            f"the program has {len(program.actions)} devices, got the work of {len(work)}"
        )
    scale = time_scale if time_scale is not None else choose_time_scale(program, costs)
    with _attentive():
        clock = EmulatedClock(time.monotonic_ns() + round(START_S * 1e9), scale)
        ranks = _Ranks(program, costs, clock, len(work))
        for rank, own in enumerate(work):
            ranks.executors[rank] = Executor(
                transport=ranks.transports[rank],
                rank_of_device=tuple(range(len(work))),
                stages=own.stages,
                output_names=output_names,
                cutter=cutter or Cutter(),
                shared=own.parameters,
                sums=ranks.sums[rank],
                timeout_s=timeout_s,
                pace=ranks.paces[rank],
            )
        recorded = ranks.run(work, unit_sizes, num_steps)
    return _result(program, costs, recorded, clock)


class _Ranks:
    """The threads of an emulation and what joins them."""

    def __init__(
        self, program: Program, costs: ProgramCosts, clock: EmulatedClock, num_ranks: int
    ) -> None:
        self.program, self.costs, self.clock = program, costs, clock
        hub, sum_hub, reservations = ThreadHub(num_ranks), ThreadSumHub(), LocalReservations()
        every = range(num_ranks)
        self.paces = [EmulatedRank(r, clock, reservations, lambda _: costs) for r in every]
        self.transports = [
            EmulatedTransport(hub.transport(r), self.paces[r], tuple(every)) for r in every
        ]
        self.sums = [EmulatedSums(ThreadSums(sum_hub, r), self.paces[r]) for r in every]
        self.executors: dict[int, Executor] = {}
        self._errors: list[BaseException] = []

    def run(
        self, work: Sequence[RankWork], unit_sizes: Sequence[int], num_steps: int
    ) -> list[_Recorded]:
        """Runs all steps on all ranks; raises the first error of any."""
        recorded = [_Recorded() for _ in work]

        def steps(rank: int) -> None:
            try:
                self.paces[rank].wait_until(0.0)
                for _ in range(num_steps):
                    self.step(rank, work[rank], unit_sizes, recorded[rank])
            except BaseException as error:
                self.fail(error)

        threads = [threading.Thread(target=steps, args=(rank,)) for rank in range(len(work))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        return recorded

    def fail(self, error: BaseException) -> None:
        """Ends all ranks with an error."""
        self._errors.append(error)
        for transport, sums in zip(self.transports, self.sums, strict=True):
            transport.abort(error)
            sums.abort(error)

    def step(
        self, rank: int, work: RankWork, unit_sizes: Sequence[int], recorded: _Recorded
    ) -> None:
        """One optimizer step of one rank."""
        pace, executor, costs = self.paces[rank], self.executors[rank], self.costs.step
        actions: list[ActionRecord] = []
        marks: list[Mark] = []
        executor.on_record = actions.append
        if rank == self.program.device(FEED):
            link = costs.host_link
            copy_s = 0.0 if link is None else link.transfer_s(costs.input_bytes)
            with _marked(marks, SpanKind.DATA):
                pace.spend("data", costs.data_s)
                pace.spend("copy", copy_s)
        executor.run(self.program, unit_sizes, training=True, boundary=work.boundary)
        run = RunRecord(tuple(actions), time.monotonic_ns())
        with (
            _marked(marks, SpanKind.OPTIMIZER),
            pace.lasting("optimizer", costs.optimizer_s.get(rank, 0.0)),
        ):
            work.step()
        recorded.ends_s.append(self.clock.now_s())
        recorded.records.append(RankRecord((run,), tuple(marks)))
        recorded.slips.append(pace.take_slips())


@contextmanager
def _marked(marks: list[Mark], kind: SpanKind) -> Iterator[None]:
    start_ns = time.monotonic_ns()
    yield
    marks.append(Mark(kind, start_ns, time.monotonic_ns()))


@contextmanager
def _attentive() -> Iterator[None]:
    """Threads get their turn soon, and nobody waits for the garbage collector."""
    before, collects = sys.getswitchinterval(), gc.isenabled()
    gc.collect()
    gc.disable()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        if collects:
            gc.enable()


def _result(
    program: Program, costs: ProgramCosts, recorded: Sequence[_Recorded], clock: EmulatedClock
) -> EmulatedRun:
    ends_s = [max(ends) for ends in zip(*(rank.ends_s for rank in recorded), strict=True)]
    measured = measured_timeline(
        [rank.records[-1] for rank in recorded],
        [ClockOffset(0, 0)] * len(recorded),
        step=len(ends_s) - 1,
        rank_of_device=range(len(recorded)),
        schedule=program.schedule,
        stages=tuple(
            TimelineStage(stage, program.device(stage), str(program.replica(stage)))
            for stage in range(program.num_stages)
        ),
    )
    return EmulatedRun(
        program,
        costs,
        step_s=ends_s[-1] - (ends_s[-2] if len(ends_s) > 1 else 0.0),
        timeline=in_emulated_time(measured, clock.time_scale),
        slip=SlipReport(tuple(slip for rank in recorded for slip in rank.slips[-1].slips)),
        time_scale=clock.time_scale,
        wall_s=ends_s[-1] * clock.time_scale,
    )


def in_emulated_time(measured: Timeline, time_scale: float) -> Timeline:
    """A timeline that was measured under emulation, in emulated seconds."""
    return replace(
        measured,
        source="emulated",
        step_s=measured.step_s / time_scale,
        spans=tuple(
            replace(span, start_s=span.start_s / time_scale, end_s=span.end_s / time_scale)
            for span in measured.spans
        ),
        clock_error_s=tuple(error_s / time_scale for error_s in measured.clock_error_s),
    )
