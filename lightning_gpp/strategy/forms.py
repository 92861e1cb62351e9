"""Forwards that are called in several forms: with and without targets, or in training and not.

Each form is captured separately and gets a pipeline of its own. All of them share the parameters,
which stay on the ranks where the plan of the first form has put them, until there is another plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_gpp.capture import CapturedModel
from lightning_gpp.capture.values.arguments import OtherFormError
from lightning_gpp.common.interrupt import interrupted_later
from lightning_gpp.planner import Plan, Stage, validate_plan
from lightning_gpp.planner.plan.manual import staged_operators
from lightning_gpp.planner.plan_to_run import PlanToRun
from lightning_gpp.strategy.build import PipelineBuild, take_pipeline
from lightning_gpp.strategy.pipeline import Pipeline
from lightning_gpp.strategy.pipeline_of_plan import pipeline_of_plan
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.planning.planning import Example
from lightning_gpp.strategy.ranks.messages import Autocast, Build
from lightning_gpp.strategy.report import show
from lightning_gpp.strategy.state.held_elsewhere import lifted

MOST_FORMS = 8
"""Forms of call of one forward; an argument with more values than that is no form."""


def use_form_of(
    run: PipelinedRun,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    example: Callable[[], Example],
) -> None:
    """Rank 0: all ranks use the pipeline of this form of call, which is built if there is none.

    Args:
        run: whose pipeline in use, if there is one, is of another form.
        args: of the call.
        kwargs: likewise, by name.
        example: makes what the form is captured with.

    Raises:
        ValueError: there can be one form only.
    """
    found = None
    for pipeline in run.forms:
        try:
            pipeline.captured.inputs_of_call(args, kwargs)
        except OtherFormError as error:
            found = error
            continue
        run.to_form(pipeline)
        return
    settings, why_not = run.settings, ""
    if len(run.forms) >= MOST_FORMS:
        why_not = f"forward has been called in {MOST_FORMS} forms already"
    elif run.peers or settings.is_emulated or settings.is_asynchronous or settings.full_graph:
        why_not = "pipelines side by side run one form, as do asynchronous, emulated and full-graph"
    if found is not None and why_not:
        raise ValueError(f"{found} ({why_not})") from None
    autocast = Autocast.current(run.device)
    run.lead(Build(autocast))
    with autocast.while_building(run.device):
        build_form(run, example)
    run.leader_state.look_again()
    if len(run.forms) == 1:  # the first one may be that of training, which makes the plan
        use_form_of(run, args, kwargs, example)


def build_form(run: PipelinedRun, example: Callable[[], Example] | None) -> None:
    """All ranks: builds the pipeline of a form of call, and uses it from now on.

    The module is whole on every rank while it is captured.

    Args:
        run: of this rank.
        example: on rank 0, makes a micro-batch of the form.

    Raises:
        ValueError: the operators of the form do not fit where the first one put the parameters.
    """
    if not run.forms:
        run.builder(run, None if example is None else example())
        return
    partition = run.partition
    with torch.inference_mode(False), torch.enable_grad(), lifted():
        partition.reunite(on_all_ranks=True)
        try:
            build = PipelineBuild(run, None if example is None else example())
            build.capture_shared()
            pipeline = _pipeline_of_form(run, build.captured)
        finally:
            partition.make_partial()
        run.take_form(pipeline)
        run.model = pipeline
    show(
        f"The forward is called in another form (number {len(run.forms)}), which is captured "
        f"separately and runs on the same devices, in {pipeline.plan.num_stages} stages."
    )


def _pipeline_of_form(run: PipelinedRun, captured: CapturedModel) -> Pipeline:
    """All ranks: the pipeline of a further form of call, on the parameters where they are.

    Raises:
        ValueError: the operators of the form do not fit where the first one put the parameters.
    """
    first = run.forms[0]
    return pipeline_of_plan(run, captured, _plan(run, captured), first.schedule, first=first)


def _plan(run: PipelinedRun, captured: CapturedModel) -> Plan:
    """The plan of the first form with the operators of another, each where its parameters are."""
    first, graph, prefix = run.forms[0], captured.graph, run.settings.prefix
    plan, ranks, stages = first.plan, first.rank_of_device, list(first.plan.stages)
    known = {name: stage.id for stage in stages for name in stage.operators}
    homes = [{ranks[device] for device in stage.devices} for stage in stages]
    holders = run.partition.holders_of_all_names()
    claimed: dict[str, int] = {}
    for operator in graph:
        names, _ = captured.tensors_read(captured.nodes(operator.name))
        if not names:
            continue
        held = set.intersection(*(set(holders[prefix + name]) for name in names))
        can = [s for s, home in enumerate(homes) if home <= held]
        if not can and 0 in held:  # no stage of the first form reads them
            device = (ranks.index(0),)
            multiple = stages[-1].microbatch_multiple
            stages.append(Stage(len(stages), (operator.name,), device, multiple))
            homes.append({0})
            can = [len(stages) - 1]
        if not can:
            raise ValueError(_APART.format(operator.name, ", ".join(names)))
        own, same = known.get(operator.name), [s for s in can if homes[s] == held]
        claimed[operator.name] = own if own in can else (same or can)[-1]
    claimed = claimed or {graph.operators[-1].name: plan.num_stages - 1}  # no parameters at all
    used = sorted({*claimed.values()})
    positions = {name: used.index(stage) for name, stage in claimed.items()}
    labels = [", ".join(n for n, s in claimed.items() if s == stage) for stage in used]
    found = [
        replace(stages[used[position]], id=place, operators=operators)
        for place, (position, operators) in enumerate(staged_operators(graph, positions, labels))
    ]
    made = replace(plan, stages=tuple(found))
    try:
        validate_plan(made, graph, len(ranks), cuts=False)
    except ValueError as error:
        raise ValueError(_UNFIT.format(error)) from None
    return made


def use_plan(run: PipelinedRun, plan: Plan, planned: PlanToRun | None) -> None:
    """All ranks, between steps: the pipeline is that of another plan from now on.

    The module and its optimizers are made whole on every rank, as they are at the end of a run, and
    divided again, as they were at the beginning. What was captured stays. Further
    forms of call move along. Where one of them reads together what the plan puts apart, the present
    plan stays; all ranks find that out alike.

    Args:
        run: whose pipeline is built.
        plan: of all ranks, for the first form of call and its schedule.
        planned: how it came about, on rank 0.
    """
    forms = run.forms
    with interrupted_later(), torch.inference_mode(False), torch.enable_grad(), lifted():
        try:
            _move(run, forms, plan, planned)
        except ValueError as error:
            show(f"After all the plan stays: {error}")
            _move(run, forms, forms[0].plan, forms[0].planned)


def _move(
    run: PipelinedRun, forms: Sequence[Pipeline], plan: Plan, planned: PlanToRun | None
) -> None:
    """All ranks: the first form of call runs by a plan, and the others where that puts weights."""
    first, control, partition, run.is_placing = forms[0], run.control, run.partition, True
    states = [partial.whole_state_dict() for partial in run.partial_optimizers]
    states = control.share(states if control.is_leader else None, "waiting for optimizer state")
    partition.reunite(on_all_ranks=True)
    for average in run.averages:
        average.reunite(on_all_ranks=True)
    for partial, state in zip(run.partial_optimizers, states, strict=True):
        partial.make_whole(state)
    for form in run.forms:
        form.close()
    run.forms, run.model = [], None
    run.num_plans += 1
    pipeline = pipeline_of_plan(run, first.captured, plan, first.schedule, planned=planned)
    take_pipeline(run, pipeline)
    for form in forms[1:]:
        run.take_form(_pipeline_of_form(run, form.captured))


_ALIKE = "Call it alike in all steps, or pipeline a sub-module by GraphPipeStrategy(module=...)."
_UNFIT = (
    "forward was called with arguments of another form, which does not fit the plan of the first: "
    f"{{}}. {_ALIKE}"
)
_APART = (
    "forward was called with arguments of another form. In this form {!r} reads {}, which the plan "
    f"of the first form put on different devices. {_ALIKE}"
)
