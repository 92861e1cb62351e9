"""From recorded timelines to a refit of the costs that their plan was made from."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from lightning_gpp.graph import FEED
from lightning_gpp.planner import Plan, PlanRequest
from lightning_gpp.planner.step_time.pipeline_run import num_microbatches
from lightning_gpp.schedule import Program
from lightning_gpp.simulate.plan_costs import program_costs
from lightning_gpp.simulate.program_costs import Overhead
from lightning_gpp.simulate.refit.fit import fit_links, fit_overhead, fit_receive
from lightning_gpp.simulate.refit.recorded import Recorded, check_program, typical_steps
from lightning_gpp.simulate.refit.refit import DeviceRecord, Refit, StageRecord
from lightning_gpp.simulate.simulation import simulate
from lightning_gpp.simulate.timeline.predicted import predicted_timeline
from lightning_gpp.simulate.timeline.span import SpanKind
from lightning_gpp.simulate.timeline.timeline import Timeline
from lightning_gpp.simulate.timeline.windows import pace_s

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
        ValueError: no step is left, or the timelines are of another program.
    """
    used = [t for t in timelines if t.step is None or t.step >= skip_steps]
    if not used:
        steps = ", ".join(str(timeline.step) for timeline in timelines) or "none"
        raise ValueError(
            f"a refit needs a recorded step from step {skip_steps} on (those before are warming "
            f"up); got steps: {steps}"
        )
    for timeline in used:
        check_program(timeline, program)
    recorded = Recorded(typical_steps(used), program)
    found = replace(
        _refit_of_actions(recorded, used, plan, request),
        step_s=statistics.median(timeline.step_s for timeline in used),
        devices=tuple(
            DeviceRecord(device, recorded.optimizer_s(device), recorded.finish_s(device))
            for device in range(plan.num_devices)
        ),
        data_s=recorded.action_s(None, SpanKind.DATA),
        prepare_s=recorded.prepare_s(),
        turn_s=recorded.gap_s(is_turn=True),
        action_s=recorded.gap_s(is_turn=False),
    )
    links = fit_links(recorded.messages(), found.receive, request.cluster)
    found = replace(found, links=links)
    return replace(found, reduce=_reduce_overhead(found, recorded, plan, request))


def refit_windows(
    timelines: Sequence[Timeline], program: Program, plan: Plan, request: PlanRequest
) -> Refit:
    """What recorded windows say, where the pipeline does not drain between steps.

    What a rank does between two windows (results are joined and told, the optimizer, hooks, data)
    is one number: the median, as a validation may come between; it is the optimizer's of the refit.
    Links are as they are taken for.

    Args:
        timelines: of windows; at least one.
        program: that has them, or windows of the same stages.
        plan: what it was made from.
        request: the question that the plan answers, with the costs to correct.
    """
    between_s: defaultdict[int, list[float]] = defaultdict(list)
    inside_s: list[float] = []
    for device, gap_s, is_between in (gap for timeline in timelines for gap in _gaps(timeline)):
        (between_s[device] if is_between else inside_s).append(gap_s)
    return replace(
        _refit_of_actions(Recorded(timelines, program), timelines, plan, request),
        step_s=statistics.median(pace_s(timeline) or timeline.step_s for timeline in timelines),
        devices=tuple(
            DeviceRecord(device, statistics.median(found) if (found := between_s[device]) else None)
            for device in range(plan.num_devices)
        ),
        action_s=statistics.fmean(inside_s) if inside_s else 0.0,
    )


def _gaps(timeline: Timeline) -> Iterator[tuple[int, float, bool]]:
    """Between two actions of a device: the device, seconds, and whether a window ends there."""
    for rank, device in enumerate(timeline.devices):
        spans = timeline.of_rank(rank)
        numbers = [number for number, span in enumerate(spans) if span.action is not None]
        for one, other in pairwise(numbers):
            before, after = spans[one], spans[other]
            if before.action != after.action:
                yield device, after.start_s - before.end_s, other > one + 1


def _refit_of_actions(
    recorded: Recorded, used: Sequence[Timeline], plan: Plan, request: PlanRequest
) -> Refit:
    """What stages, the parts of the user's step in them, and messages took."""
    program, action_s, messages = recorded.program, recorded.action_s, recorded.messages()
    loss = program.loss_stage
    is_empty = program.replica(loss).stage >= plan.num_stages
    loss_s = action_s(loss, SpanKind.LOSS)
    loss_s += action_s(loss, SpanKind.FORWARD) if is_empty else 0.0
    return Refit(
        steps=tuple(timeline.step for timeline in used if timeline.step is not None),
        step_s=0.0,
        schedule=program.schedule.name,
        num_microbatches=num_microbatches(plan, request) // request.num_minibatches,
        minibatch_size=request.minibatch_size // request.num_minibatches,
        stages=tuple(_stage_records(recorded, plan, request)),
        devices=(),
        feed_s=action_s(FEED, SpanKind.FEED),
        feed_backward_s=action_s(FEED, SpanKind.BACKWARD),
        loss_s=loss_s,
        loss_backward_s=action_s(loss, SpanKind.BACKWARD) if is_empty else 0.0,
        send=fit_overhead((m.size_bytes, m.send_s) for found in messages for m in found),
        receive=fit_receive(messages),
    )


def _reduce_overhead(
    found: Refit, recorded: Recorded, plan: Plan, request: PlanRequest
) -> Overhead:
    """What sums of gradients took longer than simulated, by their bytes."""
    program = recorded.program
    if not program.reduce_groups:
        return Overhead()
    costs = program_costs(plan, found.request(request), step=found.step_costs(plan))
    size_bytes: Counter[int] = Counter()
    for bucket in costs.buckets:
        size_bytes[bucket.group] += round(bucket.size_bytes)
    timeline = predicted_timeline(simulate(program, costs))
    exposed_s = {(g, device): s for g, device, s in Recorded([timeline], program).sums()}
    return fit_overhead(
        (size_bytes[group], max(0.0, seconds - exposed_s.get((group, device), 0.0)))
        for group, device, seconds in recorded.sums()
    )


def _stage_records(recorded: Recorded, plan: Plan, request: PlanRequest) -> Iterator[StageRecord]:
    """Every stage on every kind of device that it runs on; replicas of one kind together."""
    program = recorded.program
    unit_size = request.minibatch_size / num_microbatches(plan, request)
    replicas: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for number in range(program.num_stages):
        stage = program.replica(number).stage
        if stage < plan.num_stages:
            kind = request.cluster.devices[program.device(number)].kind
            replicas[stage, kind].append(number)
    for (stage, kind), numbers in sorted(replicas.items()):
        one = plan.stages[stage]
        share = unit_size * statistics.fmean(map(program.multiple, numbers))
        yield StageRecord(
            stage,
            kind,
            one.operators,
            share,
            one.recompute,
            statistics.fmean(recorded.action_s(n, SpanKind.FORWARD) for n in numbers),
            statistics.fmean(recorded.action_s(n, SpanKind.BACKWARD) for n in numbers),
        )
