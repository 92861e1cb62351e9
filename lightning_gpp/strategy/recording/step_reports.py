"""Recorded steps beside what was predicted of them: from the plan's costs, and from a refit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

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

MOST_KEPT = 24
"""Steps before this one that a refit looks at: devices are as they are now."""


def _question(pipeline: Pipeline, timeline: Timeline) -> tuple[Program, Plan, PlanRequest]:
    """The step that a pipeline trained last, and what its plan answers.

    Plan and request have as many micro-batches and samples as the step had.

    Raises:
        ValueError: it cannot be compared; the text says why.
    """
    planned, program, sizes = pipeline.planned, pipeline.last_trained, pipeline.last_sizes
    if planned is None:
        raise ValueError("its forward was called in another form than the one that was planned")
    if program is None or any(span.minibatch for span in timeline.spans):
        raise ValueError("it ran several mini-batches or calls")
    if len(sizes) % pipeline.placed.units_at_a_time:
        raise ValueError("its mini-batch was too small for the plan")
    check_program(timeline, program)
    request = replace(planned.request, minibatch_size=sum(sizes), num_microbatches=None)
    return program, replace(pipeline.plan, num_microbatches=len(sizes)), request


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

    @property
    def slow(self) -> list[str]:
        """What to say of devices that are slower than others of their kind."""
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
        """How far the predictions are off, and where they are from."""
        found = (
            f"Predicted by the {name}: {seconds_text(timeline.step_s)} "
            f"({100 * self.error(name):+.0f} %)."
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
        """The report on what was run last, or why there is none.

        Args:
            pipeline: that ran it.
            timeline: what was recorded of it.
            known: the refit whose costs the plan was made with, if it was.
        """
        try:
            program, plan, request = _question(pipeline, timeline)
        except ValueError as error:
            return f"Not compared with a prediction: {error}."

        def predicted(found: Refit | None = None) -> Timeline:
            """The program as it is simulated: with the costs of the plan, or refitted."""
            ranks, costs = pipeline.rank_of_device, found or known
            asked = request if found is None else found.request(request, ranks)
            step = StepCosts() if costs is None else costs.step_costs(plan)
            simulation = simulate(program, program_costs(plan, asked, step=step))
            stages = timeline_stages(pipeline, program)
            return predicted_timeline(simulation, stages=stages, rank_of_device=ranks)

        name, note = _source(known, request)
        predictions, notes, last = {name: predicted()}, [note], None
        assert timeline.step is not None
        # The costs of emulated devices are known: they are those of the cluster.
        is_refitted = timeline.source != "emulated"
        if is_refitted and timeline.step < WARM_UP_STEPS:
            notes.append(f"Steps before step {WARM_UP_STEPS} are warming up: no refit.")
        elif is_refitted:
            key = program, request.minibatch_size
            earlier = [t for *known_as, t in self._recorded if tuple(known_as) == key]
            self._recorded = [*self._recorded[-MOST_KEPT:], (*key, timeline)]
            last = refit([*earlier, timeline], program, plan, request)
            if earlier:
                predictions["refit"] = predicted(refit(earlier, program, plan, request))
                steps = ", ".join(str(each.step) for each in earlier)
                notes.append(f"refit: of the steps recorded before ({steps}).")
            else:
                predictions["fit"] = predicted(last)
                notes.append("fit: the same refitted to what was recorded, so no prediction of it.")
        shown = "refit" if "refit" in predictions else name
        return StepReport(timeline, predictions, shown, tuple(notes), last)
