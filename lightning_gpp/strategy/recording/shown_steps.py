"""What becomes of recorded steps on rank 0: files, numbers for loggers, lines on the console."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import lightning.pytorch as pl

from lightning_gpp.common.text_table import wrapped
from lightning_gpp.common.units_of_measure import percent_text, seconds_text
from lightning_gpp.reports.step.write_step import write_step
from lightning_gpp.simulate import Timeline, shares
from lightning_gpp.simulate.timeline.windows import pace_s
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.planning.plan_cache import PlanCache
from lightning_gpp.strategy.recording.step_reports import StepReport
from lightning_gpp.strategy.report import show, width


class ShownSteps:
    """Shows every step that is recorded in a fit, or the typical one of several.

    Args:
        trainer: of the fit.
        run: that is recorded.
        folder: for files.
        writes: which files, see :func:`~lightning_gpp.reports.step.write_step.write_step`.
        num_to_choose_from: recorded steps of which the one of median length is shown; None shows
            them all.
        are_in_one_timeline: whether there is one for all of them.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        run: PipelinedRun,
        folder: Path,
        writes: Mapping[str, bool],
        *,
        num_to_choose_from: int | None,
        are_in_one_timeline: bool,
    ) -> None:
        self._trainer, self._run, self._folder, self._writes = trainer, run, folder, writes
        self._num_to_choose_from = num_to_choose_from
        self._is_only_one = num_to_choose_from is not None or are_in_one_timeline
        self._recorded: list[tuple[Timeline, StepReport | str, int]] = []

    def take(self, timeline: Timeline, report: StepReport | str, num_windows: int) -> None:
        """Shows a step, or keeps it until the typical one of several is known.

        Args:
            timeline: of the step.
            report: how it compares with its prediction, or why it does not.
            num_windows: mini-batches that overlap in it; 0 where the pipeline drains.
        """
        if num_windows > 1:
            what = f"{num_windows} mini-batches that overlap, from step {timeline.step} on,"
            self._show(timeline, report, report, what)
        elif num_windows or self._num_to_choose_from is None:
            self._show(timeline, report, report, f"Step {timeline.step}")
        else:
            self._recorded.append((timeline, report, sum(self._run.built.last_sizes)))
            if len(self._recorded) == self._num_to_choose_from:
                self.choose_typical()

    def choose_typical(self) -> bool:
        """Shows the step of median length of those that were kept; whether there were any.

        It is one with a whole mini-batch, and with a refit of others, which the first has not.
        """
        recorded, self._recorded = self._recorded, []
        if not recorded:
            return False
        most = max(num_samples for *_, num_samples in recorded)
        whole = [found for found in recorded if found[2] == most]
        refitted = [found for found in whole if _has_refit(found[1])]
        by_length = sorted(refitted or whole, key=lambda found: found[0].step_s)
        timeline, report, _ = by_length[len(by_length) // 2]
        what = f"Step {timeline.step}, the median of {len(by_length)},"
        self._show(timeline, report, whole[-1][1], what)
        return True

    def _show(
        self,
        timeline: Timeline,
        report: StepReport | str,
        last_report: StepReport | str,
        what: str,
    ) -> None:
        """Files, loggers, and a line on the console.

        Args:
            timeline: of the step.
            report: how it compares with its prediction, or why it does not.
            last_report: of the last such step recorded, which has the refit to all of them.
            what: the step in words.
        """
        assert timeline.step is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        shown = [timeline]
        if isinstance(report, StepReport):
            shown.insert(0, report.predicted)
        suffix = "" if self._is_only_one else f"-step{timeline.step}"
        written = write_step(shown, self._folder, suffix=suffix, **self._writes)
        found = shares(timeline)
        metrics = found.metrics()
        if (one_s := pace_s(timeline)) is not None:
            metrics["timeline/minibatch_s"] = one_s
        predicted = ""
        if isinstance(report, StepReport):
            metrics |= report.comparison.metrics()
            sources = report.comparison.predicted.items()
            (source,) = (name for name, shown_too in sources if shown_too is report.predicted)
            predicted = f", {seconds_text(report.predicted.step_s)} by the {source}"
        if isinstance(last_report, StepReport):
            written += self._keep(last_report)
        for logger in self._trainer.loggers:
            logger.log_metrics(metrics, step=timeline.step)
        line = wrapped(
            [
                f"{what} took {seconds_text(timeline.step_s)} ({timeline.source}{predicted}), "
                f"{percent_text(found.bubble_share, 1)} of it bubble"
            ],
            width(),
        )
        if written:
            line += f"\n  {', '.join(path.name for path in written)} in {self._folder}"
        show(line)
        if not isinstance(report, StepReport):
            if report:
                show(report)
        elif self._run.settings.report == "full":
            show(report.describe())

    def _keep(self, report: StepReport) -> list[Path]:
        """Keeps the refit for the next run of this model; on emulated devices none is kept."""
        found, planned = report.refit, self._run.built.planned
        if found is None or report.comparison.measured.source != "measured":
            return []
        assert planned is not None
        PlanCache(self._run.settings.cache).keep_refit(planned.refit_key, found)
        path = self._folder / "refit.json"
        path.write_text(found.to_json(), encoding="utf-8")
        return [path]


def _has_refit(report: StepReport | str) -> bool:
    """Whether a step is shown beside a refit of those before it."""
    return isinstance(report, StepReport) and "refit" in report.comparison.predicted
