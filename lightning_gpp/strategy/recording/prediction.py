"""What the step that a pipeline runs is predicted to be: from its costs, and from a refit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_gpp.planner import Plan, PlanRequest
from lightning_gpp.schedule import Program
from lightning_gpp.simulate import (
    StepCosts,
    Timeline,
    TimelineStage,
    predicted_timeline,
    program_costs,
    simulate,
)
from lightning_gpp.simulate.refit.from_timelines import refit
from lightning_gpp.simulate.refit.refit import Refit
from lightning_gpp.strategy.pipeline import Pipeline
from lightning_gpp.strategy.recording.timeline_stages import timeline_stages


@dataclass(frozen=True)
class Question:
    """What was run, and the question that its plan answers.

    Attributes:
        program: what was run.
        plan: what the program is of.
        request: the question that it answers.
        step: what a step is taken to cost besides, where that is known.
        stages: what timelines show of them.
        rank_of_device: rank of every device.
    """

    program: Program
    plan: Plan
    request: PlanRequest
    step: StepCosts
    stages: tuple[TimelineStage, ...]
    rank_of_device: tuple[int, ...]

    def predicted(self, found: Refit | None = None) -> Timeline:
        """The program as it is simulated: with the costs of the plan, or refitted."""
        request, step = self.request, self.step
        if found is not None:
            request = found.request(request)
            step = found.step_costs(self.plan, request.graph, base=step)
        costs = program_costs(self.plan, request, step=step)
        return predicted_timeline(
            simulate(self.program, costs), stages=self.stages, rank_of_device=self.rank_of_device
        )


def known_step(known: Refit | None, plan: Plan, request: PlanRequest) -> StepCosts:
    """What a step costs besides, as far as a refit that was planned with says."""
    return StepCosts() if known is None else known.step_costs(plan, request.graph)


class StepQuestion(Question):
    """A step that was run; plan and request have as many micro-batches and samples as it had."""

    @classmethod
    def of(cls, pipeline: Pipeline) -> StepQuestion | None:
        """Rank 0: of the last step that a pipeline trained.

        None where it had fewer samples than the stages take at a time, for which another program
        was run than the plan's.
        """
        program, planned, sizes = pipeline.last_trained, pipeline.planned, pipeline.last_sizes
        assert program is not None and planned is not None
        if len(sizes) % pipeline.placed.units_at_a_time:
            return None
        plan = replace(pipeline.plan, num_microbatches=len(sizes))
        request = replace(planned.request, minibatch_size=sum(sizes), num_microbatches=None)
        step = known_step(planned.refit, plan, request)
        stages, ranks = timeline_stages(pipeline, program), pipeline.rank_of_device
        return cls(program, plan, request, step, stages, ranks)

    def refit(self, timelines: Sequence[Timeline]) -> Refit:
        """What recorded steps of the same program say."""
        return refit(timelines, self.program, self.plan, self.request)
