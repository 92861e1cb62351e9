"""The callback that records chosen steps and shows where their time went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_gpp.common.text_table import wrapped
from lightning_gpp.common.units_of_measure import percent_text, seconds_text
from lightning_gpp.reports.step.write_step import write_step
from lightning_gpp.runtime.measured import (
    RankRecord,
    clock_lead_ns,
    measured_timeline,
)
from lightning_gpp.simulate import SpanKind, Timeline, shares
from lightning_gpp.simulate.timeline.shares import pace_s
from lightning_gpp.strategy.graphpipe import GraphPipeStrategy
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.planning.profile_cache import ProfileCache
from lightning_gpp.strategy.recording.recorder import StepRecorder
from lightning_gpp.strategy.recording.step_reports import (
    StepReport,
    StepReports,
    timeline_stages,
)
from lightning_gpp.strategy.report import show, width

TYPICAL_OF = (3, 6, 9, 12, 15)
"""Steps of which the median is shown: few, after the warm-up of allocators and optimizers, and with
others between, as the step behind a recorded one is longer."""

OVERLAPPING = (3, 4, 5, 6, 7)
"""Where the pipeline does not drain: in a row, as they are shown together."""


class TimelineCallback(pl.Callback):
    """Records some optimizer steps on every rank and writes them as picture and page.

    Rank 0 writes ``timeline.png`` and ``timeline.html`` (one page, to zoom and pan in any browser),
    or ``timeline-step3.png`` and so on when there are several steps, and gives the shares of
    :class:`~lightning_gpp.simulate.Shares` to the loggers as ``timeline/...``. An accumulated step
    is recorded with all its mini-batches.
    ``strategy.on_record`` works beside it.

    Where the pipeline does not drain (``schedule="1f1b-async"``) steps overlap: chosen steps in a
    row are one timeline, of which every mini-batch is one of its ``num_minibatches``, and every
    forward and backward says how many updates its weights had seen, a forward also how many there
    are when its backward comes (``12→15``). It is known by its first step,
    and ends where the pipeline drains (the end of an epoch, a checkpoint). It is not compared with
    a prediction. Ranks are at their windows at other times, which is idle at both ends:
    the more steps, the less of it. ``timeline/minibatch_s`` is free of it.

    With ``predict`` it also says how far the step is from its prediction, and by how
    much a refit of the costs to the steps recorded before it does better: on the console, in the
    loggers (``prediction/...``), in what is written. The refit to all steps recorded so
    far is kept: ``GraphPipeStrategy(costs="refit")`` plans with it the next time, and it is written
    to ``refit.json``, which ``GraphPipeStrategy(costs="refit.json")`` takes.

    By default it records five early steps of the run, be it one that goes on from a checkpoint, and
    shows the one of median length, of those with whole mini-batches: single steps of a machine that
    does other things as well are anything but typical.

    Steps that are not recorded cost a comparison per batch. A recorded one took 1.07 times the time
    of its unrecorded neighbour in the median of 100 pairs (quartiles 0.90 to 1.21: within the noise
    of the machine, two busy CPU cores; two ranks, eight micro-batches, steps of 21 ms;
    ``benchmarks/overhead.py recorded``). After it the clocks are compared and rank 0 draws the
    picture.

    Args:
        steps: which optimizer steps, by the steps done before them (``trainer.global_step``), all
            of which are shown; None shows a typical one of :data:`TYPICAL_OF`, which are counted
            from where the first run begins.
            The first ones hold warming-up, and are those in which an asynchronous pipeline fills.
        dirpath: where to write; by default the folder of the logger, or of the Trainer.
        picture: whether to write the picture.
        predict: whether to compare the steps with predictions, and to refit the costs.
        page: whether to write the page.

    Attributes:
        timelines: step (of several that overlap the first one) -> its timeline, on rank 0.
        reports: step -> how it compares with its predictions, on rank 0.

    Raises:
        ValueError: no step is chosen, or a negative one.
    """

    def __init__(
        self,
        steps: Sequence[int] | int | None = None,
        dirpath: str | Path | None = None,
        picture: bool = True,
        predict: bool = True,
        page: bool = True,
    ) -> None:
        chosen = TYPICAL_OF if steps is None else steps
        self.steps = (chosen,) if isinstance(chosen, int) else tuple(sorted(set(chosen)))
        if not self.steps or self.steps[0] < 0:
            raise ValueError(
                f"steps must name at least one optimizer step, counted from 0; got {steps}"
            )
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.writes = {"picture": picture, "page": page}
        self.predict = predict
        self.timelines: dict[int, Timeline] = {}
        self.reports: dict[int, StepReport] = {}
        self._is_typical = steps is None
        self._reports = StepReports()
        self._recorded: list[tuple[Timeline, StepReport | str, int]] = []
        self._done: set[int] = set()
        self._step = -1
        self._run: PipelinedRun | None = None
        self._recorder = StepRecorder(torch.device("cpu"))  # which is never on
        self._overlaps = False
        self._hooks: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finds the folder, on all ranks together."""
        if not isinstance(trainer.strategy, GraphPipeStrategy):
            rank_zero_warn(
                "TimelineCallback records what GraphPipeStrategy runs; with "
                f"{type(trainer.strategy).__name__} there is nothing to record."
            )
            return
        self._run = trainer.strategy.session.run
        self._recorder = self._run.recorder
        self._overlaps = trainer.strategy.settings.overlaps
        if self._is_typical and not self._done:
            chosen = OVERLAPPING if self._overlaps else TYPICAL_OF
            self.steps = tuple(trainer.global_step + step for step in chosen)
        if self.dirpath is None:
            self.dirpath = Path(trainer.log_dir or trainer.default_root_dir)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What was read before belongs to no step."""
        self._recorder.forget_read()

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Begins to record where a chosen step begins."""
        step = trainer.global_step
        if self._run is None or step not in self.steps or step in self._done:
            return
        if not self._recorder.is_on:
            self._recorder.start()
            self._step = step
            self._hooks = [
                optimizer.register_step_post_hook(lambda *_: self._recorder.end())
                for optimizer in trainer.optimizers
            ]

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """All gradients are there."""
        self._recorder.begin(SpanKind.OPTIMIZER)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Shows the step if this was its last mini-batch."""
        self._recorder.end_batch()
        if self._run is not None and self._is_over(trainer):
            self._finish(trainer, self._run)

    def _is_over(self, trainer: pl.Trainer) -> bool:
        """Whether what is recorded is complete, after a mini-batch."""
        if self._recorder.is_cut:
            return True
        if not self._recorder.is_on or trainer.global_step == self._step:
            return False
        goes_on = trainer.global_step in self.steps and not trainer.is_last_batch
        return not (self._overlaps and goes_on)

    def _finish(self, trainer: pl.Trainer, run: PipelinedRun) -> None:
        """All ranks: what was recorded is shown."""
        is_cut, record = self._recorder.is_cut, self._stop()
        # The step that cut a recording short was not recorded.
        self._done.update(range(self._step, trainer.global_step - is_cut))
        why = ""
        if not record.runs:
            why = "no gradient went through the forward"
        elif len({program.num_stages for program in run.recorder.programs}) > 1:
            why = "a mini-batch was too small for the plan"
        elif len(run.forms) > 1 and not all(map(run.built.has_made, run.recorder.programs)):
            why = "the forward was called in several forms"
        if why:
            if trainer.is_global_zero:
                show(f"No timeline of step {self._step}: {why}.")
            return
        with run.failures.guard():
            timeline = _gather(run, record, self._step)
            if timeline is not None:
                self._take(run, timeline)

    def _take(self, run: PipelinedRun, timeline: Timeline) -> None:
        """Rank 0: keeps the timeline of what was recorded, and shows it beside its prediction."""
        self.timelines[self._step] = timeline
        is_compared = self.predict and not self._overlaps
        report = self._reports.report(run.built, timeline) if is_compared else ""
        if isinstance(report, StepReport):
            self.reports[self._step] = report
        if self._is_typical and not self._overlaps:
            self._recorded.append((timeline, report, sum(run.built.last_sizes)))
            if len(self._recorded) == len(self.steps):
                self._show_typical(run)
            return
        what = f"Step {self._step}"
        if timeline.num_minibatches > 1:
            what = (
                f"{timeline.num_minibatches} mini-batches that overlap, from step {self._step} on,"
            )
        self._show(run, timeline, report, report, what)

    def _show_typical(self, run: PipelinedRun) -> None:
        """Rank 0: the step of median length of those that were recorded.

        It is one with a whole mini-batch, and with a refit of others, which the first has not.
        """
        recorded, self._recorded = self._recorded, []
        most = max(num_samples for *_, num_samples in recorded)
        whole = [(timeline, report) for timeline, report, count in recorded if count == most]
        refitted = [each for each in whole if getattr(each[1], "source", "") == "refit"]
        by_length = sorted(refitted or whole, key=lambda found: found[0].step_s)
        timeline, report = by_length[len(by_length) // 2]
        what = f"Step {timeline.step}, the median of {len(by_length)},"
        self._show(run, timeline, report, whole[-1][1], what)

    def _show(
        self,
        run: PipelinedRun,
        timeline: Timeline,
        report: StepReport | str,
        last_report: StepReport | str,
        what: str,
    ) -> None:
        """Rank 0: files, loggers, and a line on the console.

        Args:
            run: that was recorded.
            timeline: of the step.
            report: how it compares with its prediction, or why it does not.
            last_report: of the last such step recorded, which has the refit to all of them.
            what: the step in words.
        """
        assert self.dirpath is not None
        self.dirpath.mkdir(parents=True, exist_ok=True)
        are_in_a_row = self.steps[-1] - self.steps[0] == len(self.steps) - 1
        is_only_one = self._is_typical or len(self.steps) == 1 or (self._overlaps and are_in_a_row)
        suffix = "" if is_only_one else f"-step{timeline.step}"
        timelines = [report.predicted, timeline] if isinstance(report, StepReport) else [timeline]
        written = write_step(timelines, self.dirpath, suffix=suffix, **self.writes)
        found = shares(timeline)
        metrics = found.metrics()
        if (one_s := pace_s(timeline)) is not None:
            metrics["timeline/minibatch_s"] = one_s
        predicted = ""
        if isinstance(report, StepReport):
            metrics |= report.metrics()
            predicted = (
                f", {seconds_text(report.predicted.step_s)} predicted by the {report.source}"
            )
        if isinstance(last_report, StepReport):
            written += self._keep(run, last_report)
        for logger in run.module.trainer.loggers:
            logger.log_metrics(metrics, step=timeline.step)
        line = (
            f"{what} took {seconds_text(timeline.step_s)} ({timeline.source}{predicted}), "
            f"{percent_text(found.bubble_share, 1)} of it bubble"
        )
        files = f"\n  {', '.join(path.name for path in written)} in {self.dirpath}"
        show(wrapped([line], width()) + (files if written else ""))
        if isinstance(report, StepReport):
            report = report.describe() if run.settings.report == "full" else ""
        if report:
            show(report)

    def _keep(self, run: PipelinedRun, report: StepReport) -> list[Path]:
        """Keeps the refit for the next run of this model; on emulated devices none is kept."""
        found, planned = report.refit, run.built.planned
        if found is None or report.measured.source != "measured":
            return []
        assert planned is not None and self.dirpath is not None
        ProfileCache(run.settings.cache).keep_refit(planned.refit_key, found)
        path = self.dirpath / "refit.json"
        path.write_text(found.to_json(), encoding="utf-8")
        return [path]

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A validation may come between the mini-batches of a step."""
        self._recorder.begin(SpanKind.VALIDATION)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """It is over."""
        self._recorder.end_batch()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Shows steps of which the last ones never came; names those."""
        if self._run is None:
            return
        if self._overlaps and self._recorder.is_on:
            self._finish(trainer, self._run)
        elif self._recorder.is_on:
            self._stop()
        if not trainer.is_global_zero:
            return
        if self._recorded:
            self._show_typical(self._run)
            return
        if missing := [str(step) for step in self.steps if step not in self._done]:
            show(
                f"No timeline of step {', '.join(missing)}: training ended after "
                f"{trainer.global_step} steps, which are counted from 0; it came before this run; "
                "or the pipeline began to fill anew in it while the steps before were recorded."
            )

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Leaves nothing behind; nobody waits for the others."""
        if self._recorder.is_on or self._recorder.is_cut:
            self._stop()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Lets go of the run."""
        self._run, self._recorder = None, StepRecorder(torch.device("cpu"))
        self._recorded.clear()

    def _stop(self) -> RankRecord:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        return self._recorder.stop()


def _gather(run: PipelinedRun, record: RankRecord, step: int) -> Timeline | None:
    """All ranks: the timeline of the step on rank 0, None on the others."""
    assert run.pipeline is not None
    gathered = run.control.gather((record, clock_lead_ns()), "gathering the timeline of a step")
    time_scale = run.pipeline.time.time_scale
    if not gathered:
        return None
    return measured_timeline(
        [record if time_scale is None else replace(record, marks=()) for record, _ in gathered],
        [lead_ns for _, lead_ns in gathered],
        step=step,
        rank_of_device=run.pipeline.rank_of_device,
        schedule=run.built.schedule,
        stages=timeline_stages(run.pipeline, run.recorder.programs[0]),
        weights=run.settings.policy.name,
        time_scale=time_scale,
    )
