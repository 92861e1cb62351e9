"""Runs a program on emulated devices, with one thread for each of them.

The executor, the transport, the messages and the sums are the real ones; only the durations are
those of the emulated cluster. Tensors may be real, or shapes alone
(:mod:`helpers.threads.shapes`).
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from helpers.threads.ranks import RankSteps, RankThreads, RankWork
from helpers.threads.virtual_time import VirtualTime
from lightning_gpp.emulation.clock import EmulatedClock, SlipReport
from lightning_gpp.emulation.time_scale import choose_time_scale
from lightning_gpp.runtime.measured import ClockOffset, measured_timeline
from lightning_gpp.runtime.pieces import Cutter
from lightning_gpp.schedule import Program
from lightning_gpp.simulate import Timeline, TimelineStage
from lightning_gpp.simulate.program_costs import ProgramCosts

START_S = 0.05
"""Real seconds for all threads to start before emulated time begins."""

SWITCH_S = 1e-3
"""Real seconds after which a thread lets others run; Python's own 5 ms keep them waiting long."""


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
    is_exact: bool = False,
) -> EmulatedRun:
    """Trains some steps of a program on emulated devices; rank ``d`` is device ``d``.

    Args:
        program: what to run.
        costs: what it costs on the emulated cluster.
        work: of every device of the program.
        unit_sizes: samples of each of the smallest micro-batches.
        output_names: values that the model returns.
        cutter: cuts and joins values where stages take other numbers of samples.
        num_steps: how many steps.
        time_scale: real seconds that an emulated second takes; chosen so that the work of shapes
            fits if not given.
        timeout_s: limit of every wait, in real seconds.
        is_exact: whether time is virtual, so that nothing slips.

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
        virtual = VirtualTime(len(work)) if is_exact else None
        start_ns = time.monotonic_ns() + round(START_S * 1e9)
        clock = EmulatedClock(start_ns, scale) if virtual is None else virtual.clock(scale)
        threads = RankThreads(
            program,
            costs,
            clock,
            work,
            unit_sizes=unit_sizes,
            output_names=output_names,
            cutter=cutter or Cutter(),
            timeout_s=timeout_s,
            virtual=virtual,
        )
        found = threads.run(num_steps)
    return _result(program, costs, found, clock)


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
    program: Program, costs: ProgramCosts, found: Sequence[RankSteps], clock: EmulatedClock
) -> EmulatedRun:
    ends_s = [max(ends) for ends in zip(*(rank.ends_s for rank in found), strict=True)]
    timeline = measured_timeline(
        [rank.records[-1] for rank in found],
        [ClockOffset(0, 0)] * len(found),
        step=len(ends_s) - 1,
        rank_of_device=range(len(found)),
        schedule=program.schedule.name,
        stages=tuple(
            TimelineStage(stage, program.device(stage), str(program.replica(stage)))
            for stage in range(program.num_stages)
        ),
        time_scale=clock.time_scale,
    )
    return EmulatedRun(
        program,
        costs,
        step_s=ends_s[-1] - (ends_s[-2] if len(ends_s) > 1 else 0.0),
        timeline=timeline,
        slip=SlipReport(tuple(slip for rank in found for slip in rank.slips[-1].slips)),
        time_scale=clock.time_scale,
        wall_s=ends_s[-1] * clock.time_scale,
    )
