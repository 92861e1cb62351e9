"""A callback that records steps and shows where their time went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_gpp.common.text_table import wrapped
from lightning_gpp.common.units_of_measure import percent_text, seconds_text
from lightning_gpp.reports.step.write_step import write_step
from lightning_gpp.simulate import Timeline, shares
from lightning_gpp.simulate.refit import FORMAT
from lightning_gpp.strategy.base import BaseStrategy
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.recording.step_recording import StepRecording
from lightning_gpp.strategy.recording.step_reports import StepReport, StepReports
from lightning_gpp.strategy.report import show, width

TYPICAL_OF = (3, 6, 9, 12, 15)
"""Few steps, after the warm-up of allocators and optimizers, and with others between, as the step
behind a recorded one is longer."""


class TimelineCallback(StepRecording):
    """Records optimizer steps on every rank, and writes a typical one as a picture and a page.

    The typical step is the one of median length among those with whole mini-batches: single steps
    on a machine that does other work vary too much. An accumulated step includes all of its
    mini-batches. Rank 0 writes ``timeline.png`` and ``timeline.html``, and gives
    :class:`~lightning_gpp.simulate.Shares` to the loggers as ``timeline/...``.

    Each recorded step is compared with its prediction, and with that of a refit to the steps before
    it: on the console, in the loggers (``prediction/...``) and in the files. The refit to all
    recorded steps is written to ``refit.json``; plan with it by
    ``GraphPipeStrategy(costs="refit.json")``.

    Steps that are not recorded cost one comparison per batch. A recorded step took 1.07 times as
    long as its neighbour (median of 100 pairs, quartiles 0.90 to 1.21; two ranks on two busy cores,
    eight micro-batches, 21 ms; ``benchmarks/overhead.py recorded``).

    Args:
        steps: optimizer steps to record, by ``trainer.global_step`` before the step; None records
            :data:`TYPICAL_OF`, counted from the beginning of the first run.
        dirpath: folder for the files; by default that of the logger, or of the Trainer.
        picture: whether to write ``timeline.png``.
        page: whether to write ``timeline.html``.

    Attributes:
        timelines: step -> its timeline, on rank 0.
        reports: step -> its comparison with the predictions, on rank 0.

    Raises:
        ValueError: no step is chosen, or a negative one.
    """

    def __init__(
        self,
        steps: Sequence[int] | int | None = None,
        dirpath: str | Path | None = None,
        picture: bool = True,
        page: bool = True,
    ) -> None:
        super().__init__()
        chosen = TYPICAL_OF if steps is None else steps
        self.steps = (chosen,) if isinstance(chosen, int) else tuple(sorted(set(chosen)))
        if not self.steps or self.steps[0] < 0:
            raise ValueError(
                f"steps must name at least one optimizer step, counted from 0; got {steps}"
            )
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.writes = {"picture": picture, "page": page}
        self.timelines: dict[int, Timeline] = {}
        self.reports: dict[int, StepReport] = {}
        self._counts_from_start = steps is None
        self._reports = StepReports()
        self._recorded: list[tuple[Timeline, StepReport | str, int]] = []
        self._done: set[int] = set()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finds the folder, on all ranks together."""
        if not isinstance(trainer.strategy, BaseStrategy):
            rank_zero_warn(
                "TimelineCallback records what GraphPipeStrategy runs; with "
                f"{type(trainer.strategy).__name__} there is nothing to record."
            )
            return
        if trainer.strategy.settings.is_asynchronous:
            show("No timeline: asynchronous steps overlap; see `graphpipe job=simulate`.")
            return
        self.follow(trainer.strategy.session.run)
        if self._counts_from_start:
            self._counts_from_start = False
            self.steps = tuple(trainer.global_step + step for step in self.steps)
        if self.dirpath is None:
            self.dirpath = Path(trainer.log_dir or trainer.default_root_dir)

    def wants(self, trainer: pl.Trainer) -> bool:
        """The steps that were chosen, each once."""
        step = trainer.global_step
        return step in self.steps and step not in self._done

    def take(self, run: PipelinedRun, step: int, timeline: Timeline | None, why_not: str) -> None:
        """All ranks: the last of the steps shows one of them."""
        self._done.add(step)
        if why_not:
            show(f"No timeline of step {step}: {why_not}.")
        if timeline is None:
            return
        self.timelines[step] = timeline
        report = self._reports.report(run, timeline)
        if isinstance(report, StepReport):
            self.reports[step] = report
        self._recorded.append((timeline, report, sum(run.built.last_sizes)))
        if self._done.issuperset(self.steps):
            self._show(run)

    def _show(self, run: PipelinedRun) -> None:
        """Rank 0: files, loggers, and a line on the console, of the step of median length.

        It is one with a whole mini-batch, and with a refit of others, which the first has not.
        """
        recorded, self._recorded = self._recorded, []
        assert self.dirpath is not None
        self.dirpath.mkdir(parents=True, exist_ok=True)
        most = max(num_samples for *_, num_samples in recorded)
        whole = [(timeline, report) for timeline, report, count in recorded if count == most]
        refitted = [each for each in whole if getattr(each[1], "source", "") == "refit"]
        by_length = sorted(refitted or whole, key=lambda found: found[0].step_s)
        timeline, report = by_length[len(by_length) // 2]
        found = shares(timeline)
        timelines, metrics, predicted = [timeline], found.metrics(), ""
        if isinstance(report, StepReport):
            timelines.insert(0, report.predicted)
            metrics |= report.metrics()
            costs = ", costs corrected by earlier steps" if report.source == "refit" else ""
            predicted = f"; predicted: {seconds_text(report.predicted.step_s)}{costs}"
        written = write_step(timelines, self.dirpath, **self.writes)
        last = whole[-1][1]  # with the refit to all of them; there is none on emulated devices
        if isinstance(last, StepReport) and last.refit is not None:
            written.append(self.dirpath / "refit.json")
            written[-1].write_text(FORMAT.dumps(last.refit), encoding="utf-8")
        for logger in run.module.trainer.loggers:
            logger.log_metrics(metrics, step=timeline.step)
        of = f", the median of {len(by_length)}," if len(by_length) > 1 else ""
        line = (
            f"Step {timeline.step}{of} took {seconds_text(timeline.step_s)} "
            f"({timeline.source}{predicted}); ranks compute nothing in "
            f"{percent_text(found.bubble_share, 1)} of it (bubble)"
        )
        files = f"\n  {', '.join(path.name for path in written)} in {self.dirpath}"
        found_slow = last.slow if isinstance(last, StepReport) else []
        show(wrapped([line, *found_slow], width()) + (files if written else ""))
        if isinstance(report, str):
            show(report)
        elif run.settings.report == "full":
            show(report.describe())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Shows what was recorded of steps of which the last ones never came; names those."""
        if self._run is None:
            return
        if self.is_recording:
            self.stop()
        if self._recorded:
            self._show(self._run)
        missing = [str(step) for step in self.steps if step not in self._done]
        if missing and not self.timelines:
            show(
                f"No timeline of step {', '.join(missing)}: training ended after "
                f"{trainer.global_step} steps, which are counted from 0, or it came before this run"
            )

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Lets go of the run."""
        super().teardown(trainer, pl_module, stage)
        self._recorded.clear()
