"""From recorded timelines to a refit of the costs that their plan was made from."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_gpp.cost import Profile
from lightning_gpp.graph import FEED
from lightning_gpp.planner import Plan, PlanRequest, Stage, plan_graph
from lightning_gpp.planner.step_time.pipeline_run import num_microbatches
from lightning_gpp.schedule import Program
from lightning_gpp.simulate.engine.run import simulate
from lightning_gpp.simulate.plan_costs import program_costs
from lightning_gpp.simulate.program_costs import Overhead
from lightning_gpp.simulate.refit.fit import Point, fit_links, fit_overhead, fit_receive, fit_send
from lightning_gpp.simulate.refit.recorded import Recorded, check_program, typical_steps
from lightning_gpp.simulate.refit.records import StageRecord, devices_of
from lightning_gpp.simulate.refit.refit import Refit
from lightning_gpp.simulate.timeline.predicted import predicted_timeline
from lightning_gpp.simulate.timeline.span import SpanKind
from lightning_gpp.simulate.timeline.timeline import Timeline

WARM_UP_STEPS = 2
"""The first steps of a run are not like the others: memory is allocated, code is loaded."""


def refit(
    timelines: Sequence[Timeline],
    program: Program,
    plan: Plan,
    request: PlanRequest,
    *,
    skip_steps: int = WARM_UP_STEPS,
) -> Refit:
    """What recorded steps say about the costs that their plan was made from.

    Args:
        timelines: of one step or more; of several those that took about the median count.
        program: what they ran.
        plan: what it was made from.
        request: the question that the plan answers, with the costs to correct.
        skip_steps: earlier steps are warming up, and left out.

    Raises:
        ValueError: no step is left, or the timelines are of another program or plan.
    """
    used = tuple(t for t in timelines if t.step is None or t.step >= skip_steps)
    if not used:
        steps = ", ".join(str(timeline.step) for timeline in timelines) or "none"
        raise ValueError(
            f"a refit needs a recorded step from step {skip_steps} on (those before are warming "
            f"up); got steps: {steps}"
        )
    for timeline in used:
        check_program(timeline, program)
    recorded = Recorded(typical_steps(used), program)
    _check_plan(program, plan, request)
    messages = recorded.messages()
    receive = fit_receive(messages)
    found = replace(
        refit_of_actions(recorded.action_s, program, plan, request),
        steps=tuple(timeline.step for timeline in used if timeline.step is not None),
        step_s=statistics.median(timeline.step_s for timeline in used),
        devices=tuple(
            replace(
                held,
                optimizer_s=recorded.optimizer_s(held.device),
                finish_s=recorded.finish_s(held.device),
            )
            for held in devices_of(plan, request.graph)
        ),
        data_s=recorded.data_s(),
        prepare_s=recorded.prepare_s(),
        turn_s=recorded.turn_s(),
        action_s=recorded.gap_s(),
        send=fit_send(messages),
        receive=receive,
        links=fit_links(messages, receive, request.cluster),
    )
    return replace(found, reduce=_reduce_overhead(found, recorded, plan, request))


def refit_of_actions(
    action_s: Callable[[int, SpanKind], float], program: Program, plan: Plan, request: PlanRequest
) -> Refit:
    """What the forwards and backwards of stages, and the parts of the user's step in them, took.

    Args:
        action_s: seconds of the spans of one kind of a stage of the program.
        program: what ran.
        plan: what it was made from.
        request: the question that the plan answers.

    Returns:
        A refit of a mini-batch; what comes beside its actions is left at nothing.
    """
    count = num_microbatches(plan, request)
    per_step = count // request.num_minibatches
    loss = program.loss_stage
    is_empty = program.replica(loss).stage >= plan.num_stages
    loss_s = action_s(loss, SpanKind.LOSS)
    loss_s += action_s(loss, SpanKind.FORWARD) if is_empty else 0.0
    return Refit(
        steps=(),
        step_s=0.0,
        schedule=program.schedule.name,
        num_microbatches=per_step,
        minibatch_size=request.minibatch_size // request.num_minibatches,
        stages=_stage_records(action_s, program, plan, request),
        devices=(),
        feed_s=action_s(FEED, SpanKind.FEED),
        feed_backward_s=action_s(FEED, SpanKind.BACKWARD),
        loss_s=loss_s,
        loss_backward_s=action_s(loss, SpanKind.BACKWARD) if is_empty else 0.0,
    )


def _reduce_overhead(
    found: Refit, recorded: Recorded, plan: Plan, request: PlanRequest
) -> Overhead:
    """What sums of gradients took longer than simulated, by their bytes."""
    program = recorded.program
    if not program.reduce_groups:
        return Overhead()
    costs = program_costs(plan, found.request(request), step=found.step_costs(plan, request.graph))
    size_bytes: Counter[int] = Counter()
    for bucket in costs.buckets:
        size_bytes[bucket.group] += round(bucket.size_bytes)
    timeline = predicted_timeline(simulate(program, costs))
    exposed_s = {(g, device): s for g, device, s in Recorded((timeline,), program).sums()}
    return fit_overhead(
        [
            Point(size_bytes[group], max(0.0, seconds - exposed_s.get((group, device), 0.0)))
            for group, device, seconds in recorded.sums()
        ]
    )


def _check_plan(program: Program, plan: Plan, request: PlanRequest) -> None:
    """Raises ValueError where a program is not of a plan."""
    if program.num_microbatches != num_microbatches(plan, request):
        raise ValueError(
            f"the program has {program.num_microbatches} micro-batches, the plan "
            f"{num_microbatches(plan, request)}; take steps with full mini-batches"
        )
    placed = plan_graph(plan, request.graph)
    expected = [(s, i, d) for s, home in enumerate(placed.devices) for i, d in enumerate(home)]
    found = [
        (program.replica(stage).stage, program.replica(stage).index, program.device(stage))
        for stage in range(program.num_stages)
    ]
    if sorted(found) != sorted(expected):
        raise ValueError(
            f"the program is not of this plan: it runs (stage, replica, device) {found}, the plan "
            f"has {expected}"
        )


def _stage_records(
    action_s: Callable[[int, SpanKind], float], program: Program, plan: Plan, request: PlanRequest
) -> tuple[StageRecord, ...]:
    """Every stage on every kind of device that it runs on; replicas of one kind together."""
    unit_size = request.minibatch_size / num_microbatches(plan, request)
    replicas: dict[tuple[int, str], list[int]] = {}
    for number in range(program.num_stages):
        stage = program.replica(number).stage
        if stage < plan.num_stages:
            kind = request.cluster.devices[program.device(number)].kind
            replicas.setdefault((stage, kind), []).append(number)
    found = []
    for (stage, kind), numbers in sorted(replicas.items()):
        one = plan.stages[stage]
        share = unit_size * statistics.fmean(map(program.multiple, numbers))
        profile = request.profile(share, kind)
        forward_s, backward_s = _profile_seconds(one, profile)
        found.append(
            StageRecord(
                stage,
                kind,
                one.operators,
                share,
                one.recompute,
                statistics.fmean(action_s(n, SpanKind.FORWARD) for n in numbers),
                statistics.fmean(action_s(n, SpanKind.BACKWARD) for n in numbers),
                forward_s,
                backward_s,
            )
        )
    return tuple(found)


def _profile_seconds(stage: Stage, profile: Profile) -> tuple[float, float]:
    forward_s = sum(profile.operators[name].forward_s for name in stage.operators)
    backward_s = sum(profile.operators[name].backward_s for name in stage.operators)
    return forward_s, backward_s + (forward_s if stage.recompute else 0.0)
