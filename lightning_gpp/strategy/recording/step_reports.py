"""Recorded steps beside what was predicted of them: from the plan's costs, and from a refit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_gpp.common.units_of_measure import seconds_text
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


class Question:
    """Rank 0: the step that a pipeline trained last, and what its plan answers.

    Plan and request have as many micro-batches and samples as the step had.

    Args:
        pipeline: that ran it.
        timeline: what was recorded of it.
        known: the refit whose costs the plan was made with, if it was.

    Raises:
        ValueError: it cannot be compared; the text says why.
    """

    def __init__(self, pipeline: Pipeline, timeline: Timeline, known: Refit | None) -> None:
        planned, program = pipeline.planned, pipeline.last_trained
        if planned is None:
            raise ValueError("its forward was called in another form than the one that was planned")
        if program is None or any(span.minibatch for span in timeline.spans):
            raise ValueError("it ran several mini-batches or calls")
        self.sizes, self.program = pipeline.last_sizes, program
        if len(self.sizes) % pipeline.placed.units_at_a_time:
            raise ValueError("its mini-batch was too small for the plan")
        check_program(timeline, program)
        self._pipeline, self._known = pipeline, known
        self.plan = replace(pipeline.plan, num_microbatches=len(self.sizes))
        size = sum(self.sizes)
        self.request = replace(planned.request, minibatch_size=size, num_microbatches=None)

    def predicted(self, found: Refit | None = None) -> Timeline:
        """The program as it is simulated: with the costs of the plan, or refitted."""
        request = self.request if found is None else found.request(self.request)
        known, pipeline = found or self._known, self._pipeline
        step = StepCosts() if known is None else known.step_costs(self.plan)
        return predicted_timeline(
            simulate(self.program, program_costs(self.plan, request, step=step)),
            stages=timeline_stages(pipeline, self.program),
            rank_of_device=pipeline.rank_of_device,
        )

    def refit(self, timelines: Sequence[Timeline]) -> Refit:
        """What recorded steps of the same program say."""
        return refit(timelines, self.program, self.plan, self.request)

    def source(self) -> tuple[str, str]:
        """What the plan's own costs are, in a word and in a sentence."""
        if self._known is not None:
            return "known", f"known: costs {self._known.describe()}."
        if self.request.is_estimated:
            note = "estimate: operators were not measured, their costs are those of data sheets."
            return "estimate", note
        note = "profile: operators one by one; the user's step, data and optimizer are not in it."
        return "profile", note


def timeline_stages(pipeline: Pipeline, program: Program) -> tuple[TimelineStage, ...]:
    """What a timeline shows of the stages of a program."""
    return plan_stages(program, pipeline.plan, pipeline.captured.graph, pipeline.rank_of_device)


@dataclass(frozen=True)
class StepReport:
    """A recorded step beside its predictions.

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
        """How far the predictions are off, and where they are from."""
        found = (
            f"Predicted by the {name}: {seconds_text(timeline.step_s)} ({self.error(name):+.0%})."
            for name, timeline in self.predictions.items()
        )
        return "\n".join((*found, *self.notes))


class StepReports:
    """Reports on the steps of a run, one after the other; on rank 0."""

    def __init__(self) -> None:
        self._recorded: list[tuple[Program, int, Timeline]] = []

    def report(
        self, pipeline: Pipeline, timeline: Timeline, known: Refit | None
    ) -> StepReport | str:
        """The report on what was run last, or why there is none; see :class:`Question`."""
        try:
            question = Question(pipeline, timeline, known)
        except ValueError as error:
            return f"Not compared with a prediction: {error}."
        name, note = question.source()
        predicted, notes, last = {name: question.predicted()}, [note], None
        assert timeline.step is not None
        # The costs of emulated devices are known: they are those of the cluster.
        is_refitted = timeline.source != "emulated"
        if is_refitted and timeline.step < WARM_UP_STEPS:
            notes.append(f"Steps before step {WARM_UP_STEPS} are warming up: no refit.")
        elif is_refitted:
            key = question.program, sum(question.sizes)
            earlier = [t for *known_as, t in self._recorded if tuple(known_as) == key]
            self._recorded.append((*key, timeline))
            last = question.refit([*earlier, timeline])
            if earlier:
                predicted["refit"] = question.predicted(question.refit(earlier))
                steps = ", ".join(str(each.step) for each in earlier)
                notes.append(f"refit: of the steps recorded before ({steps}).")
            else:
                predicted["fit"] = question.predicted(last)
                notes.append("fit: the same refitted to what was recorded, so no prediction of it.")
        shown = "refit" if "refit" in predicted else name
        return StepReport(timeline, predicted, shown, tuple(notes), last)
