"""The callback that records chosen steps and shows where their time went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_gpp.runtime.clock import measure_offset
from lightning_gpp.runtime.measured import RankRecord, WindowRecord, measured_timeline
from lightning_gpp.simulate import SpanKind, Timeline
from lightning_gpp.strategy.graphpipe import GraphPipeStrategy
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.recording.recorder import StepRecorder
from lightning_gpp.strategy.recording.shown_steps import ShownSteps
from lightning_gpp.strategy.recording.step_reports import StepReport, StepReports
from lightning_gpp.strategy.recording.timeline_stages import timeline_stages
from lightning_gpp.strategy.report import show

TYPICAL_OF = (3, 6, 9, 12, 15)
"""Steps of which the median is shown: few, after the warm-up of allocators and optimizers, and with
others between, as the step behind a recorded one is longer."""

OVERLAPPING = (3, 4, 5, 6, 7)
"""Where the pipeline does not drain: in a row, as they are shown together."""


class TimelineCallback(pl.Callback):
    """Records some optimizer steps on every rank and writes them as picture, page and trace.

    Rank 0 writes ``timeline.png``, ``timeline.html`` (one page, to zoom and pan in any browser) and
    ``trace.json`` (which opens in https://ui.perfetto.dev), or ``timeline-step3.png`` and so on
    when there are several steps, and gives the shares of :class:`~lightning_gpp.simulate.Shares` to
    the loggers as ``timeline/...``. An accumulated step is recorded with all its mini-batches.
    ``strategy.on_record`` works beside it.

    Where the pipeline does not drain (``schedule="1f1b-async"``) steps overlap: chosen steps in a
    row are one timeline, of which every mini-batch is one of its ``num_minibatches``, and every
    forward and backward says how many updates its weights had seen, a forward also how many there
    are when its backward comes (``12→15``). It is known by its first step,
    and ends where the pipeline drains (the end of an epoch, a checkpoint). It is compared with the
    simulation of the same windows, also with the costs of windows recorded before; these are not
    kept for the next run. Ranks are at their windows at other times, which is idle at both ends:
    the more steps, the less of it. ``timeline/minibatch_s`` is free of it.

    With ``predict`` it also says how far the step is from its prediction, part by part, and by how
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
        trace: whether to write the trace.
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
        trace: bool = True,
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
        self.picture = picture
        self.page = page
        self.trace = trace
        self.predict = predict
        self.timelines: dict[int, Timeline] = {}
        self.reports: dict[int, StepReport] = {}
        self._is_typical = steps is None
        self._reports = StepReports()
        self._shown: ShownSteps | None = None
        self._done: set[int] = set()
        self._step = -1
        self._run: PipelinedRun | None = None
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
        self._overlaps = trainer.strategy.settings.overlaps
        if self._is_typical and not self._done:
            chosen = OVERLAPPING if self._overlaps else TYPICAL_OF
            self.steps = tuple(trainer.global_step + step for step in chosen)
        if self.dirpath is None:
            self.dirpath = Path(trainer.log_dir or trainer.default_root_dir)
        self._shown = ShownSteps(
            trainer,
            self._run,
            self.dirpath,
            {"picture": self.picture, "page": self.page, "trace": self.trace},
            num_to_choose_from=len(self.steps) if self._is_typical else None,
            are_in_one_timeline=self._are_in_one_timeline,
        )

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What was read before belongs to no step."""
        if self._run is not None:
            self._run.recorder.forget_read()

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Begins to record where a chosen step begins."""
        step = trainer.global_step
        if self._run is None or step not in self.steps or step in self._done:
            return
        recorder = self._run.recorder
        if not recorder.is_on:
            recorder.start()
            self._step = step
            self._hooks = [
                optimizer.register_step_post_hook(lambda *_: recorder.end())
                for optimizer in trainer.optimizers
            ]

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """All gradients are there."""
        if self._run is not None:
            self._run.recorder.begin(SpanKind.OPTIMIZER)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Shows the step if this was its last mini-batch."""
        if self._run is None:
            return
        recorder = self._run.recorder
        recorder.end()
        recorder.forget_read()
        if self._is_over(trainer, recorder):
            self._finish(trainer, self._run)

    def _is_over(self, trainer: pl.Trainer, recorder: StepRecorder) -> bool:
        """Whether what is recorded is complete, after a mini-batch."""
        if recorder.is_cut:
            return True
        if not recorder.is_on or trainer.global_step == self._step:
            return False
        goes_on = trainer.global_step in self.steps and not trainer.is_last_batch
        return not (self._overlaps and goes_on)

    def _finish(self, trainer: pl.Trainer, run: PipelinedRun) -> None:
        """All ranks: what was recorded is shown."""
        is_cut, record = run.recorder.is_cut, self._stop(run.recorder)
        # The step that cut a recording short was not recorded.
        self._done.update(range(self._step, trainer.global_step - is_cut))
        if not record.runs:
            if trainer.is_global_zero:
                show(f"No timeline of step {self._step}: no gradient went through the forward.")
            return
        with run.failures.guard():
            timeline = _gather(run, record, self._step)
            if timeline is not None:
                windows = [each.window for each in record.runs if each.window is not None]
                self._take(run, timeline, windows)

    def _take(self, run: PipelinedRun, timeline: Timeline, windows: Sequence[WindowRecord]) -> None:
        """Rank 0: keeps a timeline, and shows it beside its prediction.

        Args:
            run: that was recorded.
            timeline: of the step.
            windows: where the pipeline was, if it does not drain.
        """
        self.timelines[self._step] = timeline
        report: StepReport | str = ""
        if self.predict and windows:
            report = self._reports.report_windows(run.built, timeline, windows)
        elif self.predict:
            report = self._reports.report(run.built, timeline)
        if isinstance(report, StepReport):
            self.reports[self._step] = report
        assert self._shown is not None, "training has begun"
        self._shown.take(timeline, report, len(windows))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A validation may come between the mini-batches of a step."""
        if self._run is not None:
            self._run.recorder.begin(SpanKind.VALIDATION)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """It is over."""
        if self._run is not None:
            self._run.recorder.end()
            self._run.recorder.forget_read()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Shows steps of which the last ones never came; names those."""
        if self._run is None:
            return
        if self._overlaps and self._run.recorder.is_on:
            self._finish(trainer, self._run)
        elif self._run.recorder.is_on:
            self._stop(self._run.recorder)
        if not trainer.is_global_zero:
            return
        if self._shown is not None and self._shown.choose_typical():
            return
        missing = [step for step in self.steps if step not in self._done]
        if never := [str(step) for step in missing if step >= trainer.global_step]:
            show(
                f"No timeline of step {', '.join(never)}: training ended after "
                f"{trainer.global_step} steps, which are counted from 0."
            )
        if cut := [str(step) for step in missing if step < trainer.global_step]:
            show(
                f"No timeline of step {', '.join(cut)}: it came before this run, or the pipeline "
                "began to fill anew in it while the steps before were recorded."
            )

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Leaves nothing behind; nobody waits for the others."""
        if self._run is not None and (self._run.recorder.is_on or self._run.recorder.is_cut):
            self._stop(self._run.recorder)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Lets go of the run."""
        self._run = self._shown = None

    @property
    def _are_in_one_timeline(self) -> bool:
        """Whether all chosen steps are."""
        are_in_a_row = self.steps[-1] - self.steps[0] == len(self.steps) - 1
        return len(self.steps) == 1 or (self._overlaps and are_in_a_row)

    def _stop(self, recorder: StepRecorder) -> RankRecord:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        return recorder.stop()


def _gather(run: PipelinedRun, record: RankRecord, step: int) -> Timeline | None:
    """All ranks: the timeline of the step on rank 0, None on the others."""
    assert run.pipeline is not None
    offset = measure_offset(run.transport, timeout_s=run.settings.timeout_s)
    gathered = run.control.gather((record, offset), "gathering the timeline of a step")
    run.pipeline.time.leave()
    time_scale = run.pipeline.time.time_scale
    if not gathered:
        return None
    return measured_timeline(
        [record if time_scale is None else replace(record, marks=()) for record, _ in gathered],
        [offset for _, offset in gathered],
        step=step,
        rank_of_device=run.pipeline.rank_of_device,
        schedule=run.built.schedule,
        stages=timeline_stages(run.pipeline, run.recorder.program),
        weights=run.settings.policy.name,
        time_scale=time_scale,
    )
