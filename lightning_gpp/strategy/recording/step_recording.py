"""Base of callbacks that record optimizer steps on all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_gpp.runtime.measured import RankRecord, clock_lead_ns, measured_timeline
from lightning_gpp.simulate import SpanKind, Timeline
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.recording.recorder import StepRecorder
from lightning_gpp.strategy.recording.step_reports import timeline_stages


class StepRecording(pl.Callback):
    """Records those optimizer steps that :meth:`wants` names, with all their mini-batches.

    Several of these may be at work; they record different steps.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._run: PipelinedRun | None = None
        self._recorder = StepRecorder(torch.device("cpu"))  # which is never on
        self._hooks: list[Any] = []

    def wants(self, trainer: pl.Trainer) -> bool:
        """Whether to record the optimizer step that begins; the same on all ranks."""
        raise NotImplementedError

    def take(self, run: PipelinedRun, step: int, timeline: Timeline | None, why_not: str) -> None:
        """All ranks: a step was recorded.

        Args:
            run: that ran it.
            step: its number.
            timeline: of it, on rank 0 if there is one.
            why_not: why there is none.
        """
        raise NotImplementedError

    def follow(self, run: PipelinedRun) -> None:
        """Records steps of a run from now on."""
        self._run, self._recorder = run, run.recorder

    @property
    def is_recording(self) -> bool:
        """Whether a step of this callback's is under way."""
        return self._step is not None

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Data read before belong to no step."""
        self._recorder.end_batch()

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Begins to record where a wanted step begins."""
        if self._run is None or self._recorder.is_on or not self.wants(trainer):
            return
        self._recorder.start()
        self._step = trainer.global_step
        self._hooks = [
            optimizer.register_step_post_hook(lambda *_: self._recorder.end())
            for optimizer in trainer.optimizers
        ]

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """All gradients are there."""
        if self.is_recording:
            self._recorder.begin(SpanKind.OPTIMIZER)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Takes the step if this was its last mini-batch."""
        self._recorder.end_batch()
        if self._run is not None and self._step not in (None, trainer.global_step):
            with self._run.failures.guard():
                self._finish(self._run)

    def _finish(self, run: PipelinedRun) -> None:
        """All ranks: rank 0 gets what was recorded."""
        step = self._step
        assert step is not None
        record, programs, why = self.stop(), run.recorder.programs, ""
        if not record.runs:
            why = "no gradient went through the forward"
        elif len({program.num_stages for program in programs}) > 1:
            why = "a mini-batch was too small for the plan"
        elif len(run.forms) > 1 and not all(map(run.built.has_made, programs)):
            why = "the forward was called in several forms"
        self.take(run, step, None if why else _gather(run, record, step), why)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A validation may come between the mini-batches of a step."""
        if self.is_recording:
            self._recorder.begin(SpanKind.VALIDATION)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """It is over."""
        self._recorder.end_batch()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Leaves nothing behind; nobody waits for the others."""
        if self.is_recording:
            self.stop()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Lets go of the run."""
        self._run, self._recorder = None, StepRecorder(torch.device("cpu"))

    def stop(self) -> RankRecord:
        """Ends the step that is under way; what was recorded of it."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._step = [], None
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
        time_scale=time_scale,
    )
