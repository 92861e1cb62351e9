"""Another plan for a model that is being trained: stages and all state move, nothing else changes.

Between two steps the module and its optimizers are made whole on every rank, as they are at the end
of a run, and divided again by the new plan, as they were at the beginning. What was captured stays.
"""

from __future__ import annotations

import torch

from lightning_gpp.common.interrupt import interrupted_later
from lightning_gpp.planner import Plan
from lightning_gpp.planner.plan_to_run import PlanToRun
from lightning_gpp.strategy.build import PipelineBuild
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.state.held_elsewhere import lifted
from lightning_gpp.strategy.state.optimizers import PartialOptimizer


def use_plan(run: PipelinedRun, plan: Plan, planned: PlanToRun | None) -> None:
    """All ranks, between steps: the pipeline is that of another plan from now on.

    Pipelines of further forms of call are built again when they are called.

    Args:
        run: whose pipeline is built.
        plan: of all ranks, for the first form of call and its schedule.
        planned: how it came about, on rank 0.
    """
    with interrupted_later():
        run.is_placing = True
        _use_plan(run, plan, planned)


def _use_plan(run: PipelinedRun, plan: Plan, planned: PlanToRun | None) -> None:
    first, control, partition = run.forms[0], run.control, run.partition
    with torch.inference_mode(False), torch.enable_grad(), lifted():
        states = [partial.whole_state_dict() for partial in run.partial_optimizers]
        told = states if control.is_leader else None
        states = control.share(told, "waiting for the state of the optimizers")
        partition.reunite(on_all_ranks=True)
        for average in run.averages:
            average.reunite(on_all_ranks=True)
        for partial, state in zip(run.partial_optimizers, states, strict=True):
            partial.make_whole(state)
        for form in run.forms:
            form.close()
        run.forms, run.model = [], None
        run.num_plans += 1
        build = PipelineBuild(run, None)
        build.captured, build.planned = first.captured, planned
        changing = [run.settings.prefix + name for name in first.captured.changing]
        run.take(build.joined(plan, first.schedule), PartialOptimizer, changing)
