"""Makes a new plan from recorded steps every n epochs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import lightning.pytorch as pl

from lightning_gpp.common.units_of_measure import percent_text, seconds_text
from lightning_gpp.planner import plan_graph
from lightning_gpp.planner.plan.by_rank import in_plan_order
from lightning_gpp.planner.plan_to_run import PlanQuestion, PlanToRun, plan_to_run
from lightning_gpp.planner.step_time.pipeline_run import num_microbatches
from lightning_gpp.simulate import Timeline, program_costs, simulate
from lightning_gpp.simulate.refit import Refit
from lightning_gpp.strategy.build import agreed
from lightning_gpp.strategy.forms import use_plan
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.recording.step_recording import StepRecording
from lightning_gpp.strategy.recording.step_reports import StepReport, StepReports
from lightning_gpp.strategy.report import show, waiting_for

WORTH_IT = 0.05
"""Of a step: a plan that is predicted to gain less does not come; predictions are not closer."""

RECORDED, EVERY = (2, 4, 6, 8), 100
"""These of every hundred steps of an epoch: few, not the first ones, and with others between."""


class Replanning(StepRecording):
    """Records steps of every epoch, and makes a new plan after every n-th.

    The strategy adds it to the callbacks of a Trainer; see its ``replan_every_n_epochs``.

    Args:
        every_n_epochs: n.
    """

    def __init__(self, every_n_epochs: int) -> None:
        super().__init__()
        self._every_n_epochs = every_n_epochs
        self._first_step = self._num_epochs = 0
        self._slow = set[int]()
        self._forget()

    def _forget(self) -> None:
        self._reports = StepReports()
        self._refit: Refit | None = None
        self._why_not = "no step was recorded"

    def wants(self, trainer: pl.Trainer) -> bool:
        """Some steps of every epoch."""
        return (trainer.global_step - self._first_step) % EVERY in RECORDED

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The epoch before has ended, with all that comes after it."""
        super().on_train_epoch_start(trainer, pl_module)
        run, self._first_step = self._run, trainer.global_step
        assert run is not None
        if self._num_epochs and self._num_epochs % self._every_n_epochs == 0:
            with run.failures.guard():
                self._replan(run, trainer.current_epoch)
        self._num_epochs += 1

    def take(self, run: PipelinedRun, step: int, timeline: Timeline | None, why_not: str) -> None:
        """Rank 0: what is known of costs is refitted to the step as well."""
        self._why_not = why_not
        if timeline is None:
            return
        report = self._reports.report(run, timeline)
        if isinstance(report, StepReport):
            self._refit = refit = report.refit or self._refit
            for each in refit.slow if refit else ():
                if each.rank not in self._slow:
                    show(f"Step {step}: {each.describe()}. The next plan will account for it.")
                self._slow.add(each.rank)
        else:
            self._why_not = report.partition(": ")[2].rstrip(".")

    def _replan(self, run: PipelinedRun, epoch: int) -> None:
        """All ranks: take a better plan if rank 0 has found one."""
        planned = None
        if run.control.is_leader and (run.peers is None or run.peers.pipeline == 0):
            with waiting_for("Planning with recorded steps", run.module):
                planned, text = self._found(run)
            show(f"After epoch {epoch}: {text}")
        plan = None if planned is None else planned.plan
        plan = agreed(run, plan, "waiting for rank 0 to plan with recorded steps")
        if plan is not None:
            self._forget()
            use_plan(run, plan, planned)

    def _found(self, run: PipelinedRun) -> tuple[PlanToRun | None, str]:
        """Rank 0: a better plan, if there is one, and what to say of it."""
        pipeline, settings, refit = run.forms[0], run.settings, self._refit
        if refit is None or pipeline.planned is None:
            return None, f"the plan stays: {self._why_not}."
        request = pipeline.planned.request
        request = replace(request, cluster=in_plan_order(request.cluster))
        if any(operator.state for operator in request.graph):  # statistics of micro-batches
            request = replace(request, num_microbatches=pipeline.plan.num_microbatches)
        question = PlanQuestion(
            refit.request(request), settings.planner, pipeline.schedule, settings.use_all_devices
        )
        found = plan_to_run(question)
        now_s = _step_s(PlanToRun(pipeline.plan, found.request), refit)
        then_s = _step_s(found, refit)
        gain = percent_text(now_s - then_s, now_s)
        slow = "".join(f" {each.describe()}." for each in refit.slow)
        if then_s > (1 - WORTH_IT) * now_s:
            best = f"the best other one is {gain} faster" if then_s < now_s else "none is faster"
            return None, f"the plan stays: {best}.{slow}"
        return found, (
            f"a new plan, predicted to take {seconds_text(then_s)} per step instead of "
            f"{seconds_text(now_s)} ({gain} less; recorded: {seconds_text(refit.step_s)}).{slow}"
        )


@contextmanager
def replanning(trainer: pl.Trainer, run: PipelinedRun) -> Iterator[None]:
    """In this a fit is planned anew, if that is asked for and there are several devices."""
    epochs, callbacks = run.settings.replan_every_n_epochs, trainer.callbacks  # type: ignore[attr-defined]
    if epochs is None or run.is_alone:
        yield
        return
    callback = Replanning(epochs)
    callback.follow(run)
    callbacks.append(callback)
    try:
        yield
    finally:
        callbacks.remove(callback)


def _step_s(planned: PlanToRun, refit: Refit) -> float:
    """Seconds of a step with what it costs beside the plan."""
    plan, request = planned.plan, planned.request
    program = plan_graph(plan, request.graph).program(
        num_microbatches(plan, request), schedule=request.schedule
    )
    step = refit.step_costs(plan)
    return simulate(program, program_costs(plan, request, step=step)).step_s
