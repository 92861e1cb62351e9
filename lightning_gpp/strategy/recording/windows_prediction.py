"""What windows of a pipeline that does not drain are predicted to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gpp.runtime.measured import WindowRecord
from lightning_gpp.schedule import Program
from lightning_gpp.simulate import (
    ProgramCosts,
    Timeline,
    TimelineStage,
    predicted_timeline,
    program_costs,
    simulate,
)
from lightning_gpp.simulate.refit.windows import windows_costs
from lightning_gpp.simulate.timeline.windows import windows_of
from lightning_gpp.strategy.pipeline import Pipeline
from lightning_gpp.strategy.recording.timeline_stages import timeline_stages

MOST_BEFORE = 64
"""Mini-batches that are simulated before the recorded ones at most; by then a pipeline is full."""


@dataclass(frozen=True)
class WindowsQuestion:
    """Windows that were run, in a program that has them.

    Attributes:
        program: of some mini-batches before them, theirs, and those that were in flight at the end.
        windows: their numbers in it.
        updates: of the parameters before every one.
        costs: of the program.
        stages: what timelines show of them.
        rank_of_device: rank of every device.
    """

    program: Program
    windows: range
    updates: tuple[int, ...]
    costs: ProgramCosts
    stages: tuple[TimelineStage, ...]
    rank_of_device: tuple[int, ...]

    @classmethod
    def of(cls, pipeline: Pipeline, windows: Sequence[WindowRecord]) -> WindowsQuestion:
        """Rank 0: of windows that a pipeline ran, one after the other."""
        planned = pipeline.planned
        assert planned is not None
        plan, request, known = planned.plan, planned.request, planned.refit
        before = min(windows[0].since, MOST_BEFORE)
        count = before + len(windows) + windows[-1].remaining
        step = None if known is None else known.step_costs(plan, request.graph)
        return cls(
            pipeline.placed.program(count, schedule=pipeline.schedule, check=False),
            range(before, before + len(windows)),
            tuple(window.updates for window in windows),
            program_costs(plan, request, step=step),
            timeline_stages(pipeline),
            pipeline.rank_of_device,
        )

    def predicted(self, recorded: Sequence[Timeline] = ()) -> Timeline:
        """The windows as they are simulated: with the costs of the plan, or of recorded windows."""
        costs = self.costs
        if recorded:
            costs = windows_costs(recorded, self.program, costs)
        whole = predicted_timeline(
            simulate(self.program, costs),
            stages=self.stages,
            rank_of_device=self.rank_of_device,
        )
        return windows_of(whole, self.program, self.windows, updates=self.updates)
