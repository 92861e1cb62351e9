"""Compares recorded steps with predictions from the plan's costs and from a refit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_gpp.common.units_of_measure import seconds_text
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
from lightning_gpp.simulate.recorded import WARM_UP_STEPS, check_program, refit
from lightning_gpp.simulate.refit import Refit
from lightning_gpp.simulate.timeline.words import plan_stages
from lightning_gpp.strategy.pipeline import Pipeline
from lightning_gpp.strategy.pipelined_run import PipelinedRun

FIRST_KEPT, LAST_KEPT = 4, 20
"""Steps before this one that a refit looks at: how devices were at first, and how they are now."""


class Question(NamedTuple):
    """The last trained step of a pipeline, and the question that its plan answers.

    Attributes:
        pipeline: that trained it.
        program: of it.
        plan: with as many micro-batches as the step had.
        request: with as many samples.
    """

    pipeline: Pipeline
    program: Program
    plan: Plan
    request: PlanRequest

    @classmethod
    def of(cls, pipeline: Pipeline, timeline: Timeline) -> Question:
        """The question of a recorded step.

        Raises:
            ValueError: it cannot be compared; the text says why.
        """
        planned, program, sizes = pipeline.planned, pipeline.last_trained, pipeline.last_sizes
        if planned is None:
            raise ValueError(
                "the step called forward in another form than the first call, for which the plan "
                "was made (num_sanity_val_steps=0 lets training call it first)"
            )
        if program is None or any(span.minibatch for span in timeline.spans):
            raise ValueError("the step ran several mini-batches or calls")
        if len(sizes) % pipeline.placed.units_at_a_time:
            raise ValueError("the step's mini-batch was too small for the plan")
        check_program(timeline, program)
        request = replace(planned.request, minibatch_size=sum(sizes), num_microbatches=None)
        plan = replace(pipeline.plan, num_microbatches=len(sizes))
        return cls(pipeline, program, plan, request)

    def predicted(self, found: Refit | None = None, known: Refit | None = None) -> Timeline:
        """The program as it is simulated.

        Args:
            found: what costs are refitted to.
            known: the refit whose costs the plan was made with, if it was.
        """
        _, program, plan, asked = self
        ranks, costs = self.pipeline.rank_of_device, found or known
        asked = asked if found is None else found.request(asked, ranks)
        step = StepCosts() if costs is None else costs.step_costs(plan)
        simulation = simulate(program, program_costs(plan, asked, step=step))
        stages = timeline_stages(self.pipeline, program)
        return predicted_timeline(simulation, stages=stages, rank_of_device=ranks)


def _source(known: Refit | None, request: PlanRequest) -> tuple[str, str]:
    """What the plan's own costs are, in a word and in a sentence."""
    if known is not None:
        return "known", f"known: costs {known.describe()}."
    if request.is_estimated:
        note = "estimate: operators were not measured, their costs are those of data sheets."
        return "estimate", note
    note = "profile: operators one by one; the user's step, data and optimizer are not in it."
    return "profile", note


def timeline_stages(pipeline: Pipeline, program: Program) -> tuple[TimelineStage, ...]:
    """The stages of a program, as timelines show them."""
    return plan_stages(program, pipeline.plan, pipeline.captured.graph, pipeline.rank_of_device)


@dataclass(frozen=True)
class StepReport:
    """A recorded step and its predictions.

    Attributes:
        measured: the step.
        predictions: by what -> the predicted step (``"profile"``, ``"refit"``).
        source: which of them is shown: by a refit of earlier steps, if there were any.
        notes: where the predictions are from.
        refit: of all steps recorded so far, this one included; None while warming up.
    """

    measured: Timeline
    predictions: Mapping[str, Timeline]
    source: str
    notes: tuple[str, ...]
    refit: Refit | None

    @property
    def predicted(self) -> Timeline:
        """The prediction to show."""
        return self.predictions[self.source]

    @property
    def slow(self) -> list[str]:
        """A note on devices that are slower than others of their kind."""
        return [] if self.refit is None else [f"{each.describe()}." for each in self.refit.slow]

    def error(self, name: str) -> float:
        """By which part of it the predicted step is longer than the measured one."""
        return self.predictions[name].step_s / self.measured.step_s - 1

    def metrics(self) -> dict[str, float]:
        """Seconds of the steps and errors, by the names under which they are logged."""
        named = {"prediction/measured/step_s": self.measured.step_s}
        for name, timeline in self.predictions.items():
            named[f"prediction/{name}/step_s"] = timeline.step_s
            named[f"prediction/{name}/error"] = self.error(name)
        return named

    def describe(self) -> str:
        """Errors of the predictions, and where the predictions come from."""
        found = (
            f"Predicted by the {name}: {seconds_text(timeline.step_s)} "
            f"({100 * self.error(name):+.0f} %)."
            for name, timeline in self.predictions.items()
        )
        return "\n".join((*found, *self.notes))


class StepReports:
    """Reports on the steps of a run, one after another; on rank 0."""

    def __init__(self) -> None:
        self._recorded: list[tuple[Program, int, Timeline]] = []

    def report(self, run: PipelinedRun, timeline: Timeline) -> StepReport | str:
        """The report on what was run last, of which this was recorded, or why there is none."""
        pipeline, costs_of_plan = run.built, run.settings.costs
        known = costs_of_plan if isinstance(costs_of_plan, Refit) else None
        try:
            question = Question.of(pipeline, timeline)
        except ValueError as error:
            return f"Not compared with a prediction: {error}."
        _, program, plan, request = question
        name, note = _source(known, request)
        predictions, notes, last = {name: question.predicted(known=known)}, [note], None
        assert timeline.step is not None
        # The costs of emulated devices are known: they are those of the cluster.
        is_refitted = timeline.source != "emulated"
        if is_refitted and timeline.step < WARM_UP_STEPS:
            notes.append(f"Steps before step {WARM_UP_STEPS} are warming up: no refit.")
        elif is_refitted:
            key = program, request.minibatch_size
            earlier = [t for *known_as, t in self._recorded if tuple(known_as) == key]
            self._recorded.append((*key, timeline))
            del self._recorded[FIRST_KEPT:-LAST_KEPT]
            last = refit([*earlier, timeline], program, plan, request)
            if earlier:
                predictions["refit"] = question.predicted(refit(earlier, program, plan, request))
                steps = ", ".join(str(each.step) for each in earlier)
                notes.append(f"refit: of the steps recorded before ({steps}).")
            else:
                predictions["fit"] = question.predicted(last)
                notes.append("fit: the same refitted to what was recorded, so no prediction of it.")
        shown = "refit" if "refit" in predictions else name
        return StepReport(timeline, predictions, shown, tuple(notes), last)
