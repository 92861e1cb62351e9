"""How recorded steps of a run compare with what was predicted of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from lightning_gpp.common.units_of_measure import seconds_text
from lightning_gpp.planner import Plan
from lightning_gpp.runtime.measured import WindowRecord
from lightning_gpp.schedule import Program
from lightning_gpp.simulate import Timeline
from lightning_gpp.simulate.refit.compare import Comparison
from lightning_gpp.simulate.refit.from_timelines import WARM_UP_STEPS
from lightning_gpp.simulate.refit.recorded import check_program, timeline_actions
from lightning_gpp.simulate.refit.refit import Refit
from lightning_gpp.simulate.timeline.windows import pace_s
from lightning_gpp.strategy.pipeline import Pipeline
from lightning_gpp.strategy.recording.prediction import StepQuestion
from lightning_gpp.strategy.recording.windows_prediction import WindowsQuestion


@dataclass(frozen=True)
class StepReport:
    """A recorded step beside its predictions.

    Attributes:
        comparison: how far they are apart.
        predicted: the prediction to show: by a refit of earlier steps, if there were any.
        notes: where the predictions are from.
        refit: of all steps recorded so far, this one included; None while warming up.
    """

    comparison: Comparison
    predicted: Timeline
    notes: tuple[str, ...]
    refit: Refit | None

    def describe(self) -> str:
        """The table and what it shows."""
        return "\n".join((self.comparison.table(), *self.notes))


class StepReports:
    """Reports on the steps of a run, one after the other; on rank 0."""

    def __init__(self) -> None:
        self._recorded: list[tuple[Program | Plan, int, Timeline]] = []

    def report(self, pipeline: Pipeline, timeline: Timeline) -> StepReport | str:
        """The report on the step that was run last, or why there is none.

        Args:
            pipeline: that ran it.
            timeline: of the step.
        """
        assert timeline.step is not None
        if any(span.minibatch for span in timeline.spans):
            return "Not compared with a prediction: it ran several mini-batches or calls."
        question = StepQuestion.of(pipeline)
        if question is None:
            return "Not compared with a prediction: its mini-batch was too small for the plan."
        try:
            check_program(timeline, question.program)
        except ValueError:
            return "Not compared with a prediction: it did not go once forward and once backward."
        name, note = _name(pipeline)
        predicted, notes = {name: question.predicted()}, [note]
        last = None
        if timeline.source != "emulated":  # there costs are known, they are those of the cluster
            last = self._refit(question, question.program, timeline, predicted, notes)
        return self._made(timeline, predicted, notes, last)

    def report_windows(
        self, pipeline: Pipeline, timeline: Timeline, windows: Sequence[WindowRecord]
    ) -> StepReport | str:
        """The report on windows of a pipeline that does not drain, or why there is none.

        Args:
            pipeline: that ran them last.
            timeline: of the windows.
            windows: where the pipeline was in each of them.
        """
        assert timeline.step is not None
        question = WindowsQuestion.of(pipeline, windows, timeline.weights)
        name, note = _name(pipeline)
        predicted, notes = {name: question.predicted()}, [note]
        if _actions(timeline) != _actions(predicted[name]):
            return "Not compared with a prediction: other actions ran than those of the program."
        last = self._refit(question, question.plan, timeline, predicted, notes)
        if last is None:
            return self._made(timeline, predicted, notes, None)
        if pace_s(timeline) is not None:
            paces = "".join(f", {name} {_pace(each)}" for name, each in predicted.items())
            notes.append(f"From the end of a step to that of the next: {_pace(timeline)}{paces}.")
        notes.append(
            "In steps that overlap what a rank does between two of them is refitted as one number, "
            "the optimizer's."
        )
        return self._made(timeline, predicted, notes, last)

    def _refit(
        self,
        question: StepQuestion | WindowsQuestion,
        same: Program | Plan,
        timeline: Timeline,
        predicted: dict[str, Timeline],
        notes: list[str],
    ) -> Refit | None:
        """The refit to all that was recorded so far; None while the run is warming up.

        Args:
            question: of what was recorded.
            same: what recordings have in common that are refitted together.
            timeline: what was recorded.
            predicted: gets the prediction of a refit to what was recorded before, if there is any.
            notes: get what it is.
        """
        assert timeline.step is not None
        if timeline.step < WARM_UP_STEPS:
            notes.append(f"Steps before step {WARM_UP_STEPS} are warming up: no refit.")
            return None
        key = same, question.request.minibatch_size
        earlier = [t for *known, t in self._recorded if tuple(known) == key]
        self._recorded.append((*key, timeline))
        last = question.refit([*earlier, timeline])
        if earlier:
            predicted["refit"] = question.predicted(question.refit(earlier))
            notes.append(f"refit: of the steps recorded before ({_steps(earlier)}).")
        else:
            predicted["fit"] = question.predicted(last)
            notes.append("fit: the same refitted to what was recorded, so no prediction of it.")
        return last

    def _made(
        self,
        timeline: Timeline,
        predicted: dict[str, Timeline],
        notes: list[str],
        found: Refit | None,
    ) -> StepReport:
        shown = predicted.get("refit", next(iter(predicted.values())))
        return StepReport(Comparison(timeline, predicted), shown, tuple(notes), found)


def _pace(timeline: Timeline) -> str:
    """Seconds from the end of one step to the end of the next."""
    found_s = pace_s(timeline)
    assert found_s is not None, "there are several"
    return seconds_text(found_s)


def _actions(timeline: Timeline) -> list[list[str | None]]:
    """Of every rank its actions in the order of time, each of them once."""
    return [
        [action for action, _ in groupby(spans, key=lambda span: span.action)]
        for spans in timeline_actions(timeline)
    ]


def _name(pipeline: Pipeline) -> tuple[str, str]:
    """What the plan's own costs are, in a word and in a sentence."""
    planned = pipeline.planned
    assert planned is not None
    if planned.refit is not None:
        return "known", f"known: costs {planned.refit.describe()}."
    if planned.request.is_estimated:
        return (
            "estimate",
            "estimate: operators were not measured, their costs are those of data sheets.",
        )
    return (
        "profile",
        "profile: operators one by one; the user's step, data and optimizer are not in it.",
    )


def _steps(timelines: list[Timeline]) -> str:
    """The steps, or how many there are."""
    if len(timelines) <= 5:
        return ", ".join(str(timeline.step) for timeline in timelines)
    return f"{len(timelines)} steps"
