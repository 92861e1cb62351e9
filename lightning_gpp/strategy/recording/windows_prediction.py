"""What windows of a pipeline that does not drain are predicted to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_gpp.planner import Plan, PlanRequest
from lightning_gpp.runtime.measured import WindowRecord
from lightning_gpp.schedule import Program
from lightning_gpp.simulate import (
    StepCosts,
    Timeline,
    TimelineStage,
    predicted_timeline,
    program_costs,
    simulate,
)
from lightning_gpp.simulate.refit.refit import Refit
from lightning_gpp.simulate.refit.windows import refit_windows
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
        plan: that they are of.
        request: the question that it answers.
        step: what a step is taken to cost besides, where that is known.
        stages: what timelines show of them.
        rank_of_device: rank of every device.
        weights: name of the policy of weights.
    """

    program: Program
    windows: range
    updates: tuple[int, ...]
    plan: Plan
    request: PlanRequest
    step: StepCosts
    stages: tuple[TimelineStage, ...]
    rank_of_device: tuple[int, ...]
    weights: str

    @classmethod
    def of(
        cls, pipeline: Pipeline, windows: Sequence[WindowRecord], weights: str
    ) -> WindowsQuestion:
        """Rank 0: of windows that a pipeline ran, one after the other, with a policy of weights."""
        planned = pipeline.planned
        assert planned is not None
        plan, request, known = planned.plan, planned.request, planned.refit
        before = min(windows[0].since, MOST_BEFORE)
        count = before + len(windows) + windows[-1].remaining
        step = StepCosts() if known is None else known.step_costs(plan, request.graph)
        return cls(
            pipeline.placed.program(count, schedule=pipeline.schedule, check=False),
            range(before, before + len(windows)),
            tuple(window.updates for window in windows),
            plan,
            request,
            step,
            timeline_stages(pipeline),
            pipeline.rank_of_device,
            weights,
        )

    def predicted(self, found: Refit | None = None) -> Timeline:
        """The windows as they are simulated: with the costs of the plan, or refitted."""
        request, step = self.request, self.step
        if found is not None:
            request = found.request(request)
            step = found.step_costs(self.plan, request.graph, base=step)
        whole = predicted_timeline(
            simulate(self.program, program_costs(self.plan, request, step=step)),
            stages=self.stages,
            rank_of_device=self.rank_of_device,
        )
        shown = windows_of(whole, self.program, self.windows, updates=self.updates)
        return replace(shown, weights=self.weights)

    def refit(self, timelines: Sequence[Timeline]) -> Refit:
        """What recorded windows of the same plan say."""
        return refit_windows(timelines, self.program, self.plan, self.request)
