"""The plan that training runs for a question: the same for the strategy and for every job.

Plans without idle devices.

Who asks for so many devices expects them in use, while the fastest plan of a small model may be one
on fewer of them.

Which schedule runs a plan where the user named none: ``gpipe`` if it fits, else ``1f1b``.

Stages that hold the activations of all micro-batches let the user's step run once on the whole
mini-batch, so any loss is exact (GPipe, arXiv 1811.06965). What they need is memory, and where that
asks for smaller micro-batches or more devices a plan of ``1f1b`` may be faster. That asks something
of the user's step, so ``1f1b`` is chosen by itself only where there is no plan otherwise; that it
would be faster is told, or taken by who asks for ``fastest``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from lightning_gpp.common.units_of_measure import bytes_text, percent_text, seconds_text
from lightning_gpp.planner.base import (
    FASTEST,
    HOLDS_ALL,
    HOLDS_FEW,
    MEAN_OVER_SAMPLES,
    DoesNotFitError,
    PlanRequest,
)
from lightning_gpp.planner.graphpipe.planner import search_on_all
from lightning_gpp.planner.make_plan import GRAPHPIPE, answer
from lightning_gpp.planner.plan.by_rank import by_rank, with_loss_on
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.plan.plan_graph import validate_plan
from lightning_gpp.planner.step_time.evaluate import evaluate_plan, plan_devices
from lightning_gpp.planner.step_time.pipeline_run import PipelineRun
from lightning_gpp.planner.units import num_separable

FEED_PART = 0.9
"""Of a step, in which the inputs of the next one can be sent: they begin with the backward, and the
last of them are needed when the next step has been under way for a while."""

WORTH_TELLING = 0.95
"""Of a step: schedules that are not faster by more are not told of, predictions are not closer."""


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """The question that training asks, or would ask.

    Attributes:
        request: the question to a planner; its own schedule plays no part.
        planner: its name.
        schedule: of the plan; None leaves it to what fits into memory, :data:`~.base.FASTEST` to
            what is faster.
        uses_all_devices: whether no device may stay idle.
        plan: made by hand; None leaves it to the planner.
        compares: whether to search for a faster plan of ``1f1b`` too, and to tell of it.
    """

    request: PlanRequest
    planner: str = GRAPHPIPE
    schedule: str | None = None
    uses_all_devices: bool = False
    plan: Plan | None = None
    compares: bool = False


@dataclass(frozen=True, slots=True)
class PlanToRun:
    """A plan whose devices are ranks; those of one made by hand are as they were given.

    Attributes:
        plan: the plan.
        request: the question that it answers, with its schedule, and the devices in its order.
        notes: why it is not the planner's plan with the schedule that is used by default.
    """

    plan: Plan
    request: PlanRequest
    notes: tuple[str, ...] = ()


def on_all_devices(plan: Plan, request: PlanRequest) -> Plan:
    """A plan, or where it leaves devices idle the fastest one found that uses all that it can."""
    most = min(request.num_devices, num_separable(request.graph))
    if most <= num_devices_used(plan):
        return plan
    return search_on_all(request, most) or plan


def why_fuller(fewer: Plan, fuller: Plan, request: PlanRequest) -> str:
    """Why another planner's plan is used."""
    few_s, full_s = (evaluate_plan(plan, request).step_s for plan in (fewer, fuller))
    used, gain = num_devices_used(fewer), "to be as fast"
    if few_s < 0.99 * full_s:
        gain = f"to take {seconds_text(few_s)} per step instead of {seconds_text(full_s)}"
    return (
        f"The plan of {fewer.planner!r} would use {used} of {request.num_devices} devices and is "
        f"predicted {gain}. devices={used}, or GraphPipeStrategy(use_all_devices=False), takes it."
    )


def _has_time_to_feed(plan: Plan, request: PlanRequest) -> bool:
    """Whether a step is long enough to send the inputs of the next one beside it."""
    fed_s = PipelineRun(plan, request).fed_s()
    return fed_s <= FEED_PART * evaluate_plan(plan, request).step_s


def num_devices_used(plan: Plan) -> int:
    """Devices with a stage or a replica of one."""
    return len({device for stage in plan.stages for device in stage.devices})


def choose_schedule(
    request: PlanRequest,
    schedule: str | None,
    search: Callable[[PlanRequest], Plan],
    *,
    compares: bool = False,
) -> tuple[Plan, PlanRequest, tuple[str, ...]]:
    """The answer of a search, its question with the schedule that runs it, and why not the first.

    Args:
        request: the question; its own schedule plays no part.
        schedule: the schedule that the user asked for; None chooses, as :data:`~.base.FASTEST`.
        search: answers the question for a schedule. It may raise :class:`DoesNotFitError`, or
            answer with a plan that does not fit.
        compares: whether to look for a faster plan of ``1f1b`` where ``gpipe`` fits.

    Returns:
        Where nothing fits with either schedule but the search has an answer, that with ``gpipe``.

    Raises:
        ValueError: of the search; where neither schedule fits that of ``1f1b``, which needs less.
    """
    if schedule not in (None, FASTEST):
        asked = request.scheduled(schedule)
        return search(asked), asked, ()
    with_all, with_few = (replace(request, schedule=name) for name in (HOLDS_ALL, HOLDS_FEW))
    first: Plan | None = None
    with suppress(DoesNotFitError):
        first = search(with_all)
        if _fits(first, with_all):
            found = first, with_all, ()
            takes = schedule == FASTEST
            return _or_faster(first, with_all, search, takes) if takes or compares else found
    second = search(with_few)
    if first is not None and not _fits(second, with_few):
        return first, with_all, ()
    if _fits(second, with_all):  # the first search has missed it
        return second, with_all, ()
    return second, with_few, (_why_few(second, with_all),)


def _or_faster(
    plan: Plan, with_all: PlanRequest, search: Callable[[PlanRequest], Plan], takes: bool
) -> tuple[Plan, PlanRequest, tuple[str, ...]]:
    """A plan, or whether one of ``1f1b`` is faster, which is told, or taken."""
    with_few, few = replace(with_all, schedule=HOLDS_FEW), None
    with suppress(DoesNotFitError):
        few = search(with_few)
    step_s = evaluate_plan(plan, with_all).step_s
    few_s = evaluate_plan(few, with_few).step_s if few and _fits(few, with_few) else step_s
    if few is None or few_s >= WORTH_TELLING * step_s:
        return plan, with_all, ()
    gain = percent_text(step_s - few_s, step_s)
    gain += f" faster ({seconds_text(few_s)} instead of {seconds_text(step_s)} a step"
    if takes:
        text = f"Schedule: {HOLDS_FEW}, predicted to be {gain} with {HOLDS_ALL})"
        return few, with_few, (f"{text}; {MEAN_OVER_SAMPLES}.",)
    text = f'Schedule: schedule="{HOLDS_FEW}" would be {gain})'
    return plan, with_all, (f'{text}, and schedule="{FASTEST}" takes it; {MEAN_OVER_SAMPLES}.',)


def _fits(plan: Plan, request: PlanRequest) -> bool:
    return all(device.fits for device in plan_devices(plan, request))


def _why_few(plan: Plan, with_all: PlanRequest) -> str:
    """Why a plan does not run with the schedule that holds all micro-batches."""
    lacking = [device for device in plan_devices(plan, with_all) if not device.fits]
    worst = max(lacking, key=lambda device: device.memory_bytes - (device.limit_bytes or 0))
    return (
        f"Schedule: {HOLDS_FEW}, as the activations of all micro-batches do not fit into memory "
        f"({HOLDS_ALL} needs {bytes_text(worst.memory_bytes)} of "
        f"{bytes_text(worst.limit_bytes or 0)} on device {worst.device} with this plan, and no "
        f"other was found); {MEAN_OVER_SAMPLES}."
    )


def plan_to_run(
    question: PlanQuestion, search: Callable[[PlanRequest, str], Plan] = answer
) -> PlanToRun:
    """Asks the planner, fills idle devices, and numbers devices as the ranks that they will be.

    Where one device trains a model with statistics (BatchNorm), they are those of whole
    mini-batches if memory allows: measured costs, which vary, are no reason for others. A plan
    whose step is too short to send inputs beside it is made anew, with inputs in the step.

    Args:
        question: the question.
        search: asks a planner by its name.

    Raises:
        ValueError: there is no such planner or no plan, or the one made by hand cannot run.
    """
    found = _plan_to_run(question, search)
    if not found.request.feeds_ahead or _has_time_to_feed(found.plan, found.request):
        return found
    request = replace(question.request, inputs_ahead=False)
    return _plan_to_run(replace(question, request=request), search)


def _plan_to_run(question: PlanQuestion, search: Callable[[PlanRequest, str], Plan]) -> PlanToRun:
    request, made = question.request, question.plan
    if made is not None:
        validate_plan(made, request.graph, request.num_devices)
        plan, request, notes = choose_schedule(
            request, question.schedule, lambda _: made, compares=question.compares
        )
        return PlanToRun(plan, request, notes)

    def found_for(asked: PlanRequest) -> Plan:
        has_choice = asked.num_devices == 1 and asked.num_microbatches is None
        if has_choice and any(operator.state for operator in asked.graph):
            with suppress(DoesNotFitError):
                whole = search(replace(asked, num_microbatches=1), question.planner)
                if _fits(whole, asked):
                    return whole
        return search(asked, question.planner)

    plan, request, notes = choose_schedule(
        request, question.schedule, found_for, compares=question.compares
    )
    if question.uses_all_devices and (full := on_all_devices(plan, request)) != plan:
        notes += (why_fuller(plan, full, request),)
        plan = full
    plan = with_loss_on(plan, request.num_devices - 1, request)
    return PlanToRun(*by_rank(plan, request), notes)
