"""What windows of a pipeline that does not drain are predicted to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_gpp.runtime.measured import WindowRecord
from lightning_gpp.simulate import Timeline
from lightning_gpp.simulate.refit.from_timelines import refit_windows
from lightning_gpp.simulate.refit.refit import Refit
from lightning_gpp.simulate.timeline.windows import windows_of
from lightning_gpp.strategy.pipeline import Pipeline
from lightning_gpp.strategy.recording.prediction import Question, known_step
from lightning_gpp.strategy.recording.timeline_stages import timeline_stages

MOST_BEFORE = 64
"""Mini-batches that are simulated before the recorded ones at most; by then a pipeline is full."""


@dataclass(frozen=True)
class WindowsQuestion(Question):
    """Windows that were run, in a program of some mini-batches before them, theirs, and more.

    Attributes:
        windows: their numbers in the program.
        updates: of the parameters before every one.
        weights: name of the policy of weights.
    """

    windows: range
    updates: tuple[int, ...]
    weights: str

    @classmethod
    def of(
        cls, pipeline: Pipeline, windows: Sequence[WindowRecord], weights: str
    ) -> WindowsQuestion:
        """Rank 0: of windows that a pipeline ran, one after the other, with a policy of weights."""
        planned = pipeline.planned
        assert planned is not None
        plan, request = planned.plan, planned.request
        before = min(windows[0].since, MOST_BEFORE)
        count = before + len(windows) + windows[-1].remaining
        program = pipeline.placed.program(count, schedule=pipeline.schedule, check=False)
        return cls(
            program,
            plan,
            request,
            known_step(planned.refit, plan, request),
            timeline_stages(pipeline, program),
            pipeline.rank_of_device,
            windows=range(before, before + len(windows)),
            updates=tuple(window.updates for window in windows),
            weights=weights,
        )

    def predicted(self, found: Refit | None = None) -> Timeline:
        """The windows as they are simulated: with the costs of the plan, or refitted."""
        whole = super().predicted(found)
        shown = windows_of(whole, self.program, self.windows, updates=self.updates)
        return replace(shown, weights=self.weights)

    def refit(self, timelines: Sequence[Timeline]) -> Refit:
        """What recorded windows of the same plan say."""
        return refit_windows(timelines, self.program, self.plan, self.request)
