"""The plan that training runs for a question: the same for the strategy and for every job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_gpp.planner.all_devices import on_all_devices, why_fuller
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.graphpipe import SearchResult
from lightning_gpp.planner.make_plan import GRAPHPIPE, ask
from lightning_gpp.planner.plan.by_rank import by_rank, rank_of_device, with_loss_on
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.plan.validate import validate_plan
from lightning_gpp.planner.schedule_choice import choose_schedule


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """What training asks, or would ask.

    Attributes:
        request: the question to a planner; its own schedule plays no part.
        planner: its name.
        schedule: of the plan; None leaves it to what fits into memory.
        uses_all_devices: whether no device may stay idle.
        plan: made by hand; None leaves it to the planner.
    """

    request: PlanRequest
    planner: str = GRAPHPIPE
    schedule: str | None = None
    uses_all_devices: bool = False
    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class PlanToRun:
    """A plan whose devices are ranks; those of one made by hand are as they were given.

    Attributes:
        plan: the plan.
        request: the question that it answers, with its schedule, and the devices in its order.
        ranks: of the devices in the order of the question.
        result: what the planner says of its search.
        notes: why it is not the planner's plan with the schedule that is used by default.
    """

    plan: Plan
    request: PlanRequest
    ranks: tuple[int, ...]
    result: SearchResult
    notes: tuple[str, ...] = ()


def plan_to_run(
    question: PlanQuestion,
    search: Callable[[PlanRequest, str], SearchResult] = ask,
    fuller: Callable[[Plan, PlanRequest], Plan] = on_all_devices,
) -> PlanToRun:
    """Asks the planner, fills idle devices, and numbers devices as the ranks that they will be.

    Args:
        question: the question.
        search: asks a planner by its name.
        fuller: a plan on more devices.

    Raises:
        ValueError: there is no such planner or no plan, or the one made by hand cannot run.
    """
    request, made = question.request, question.plan
    if made is not None:
        validate_plan(made, request.graph, request.num_devices)
        result = SearchResult(made)
        answered = choose_schedule(request, question.schedule, lambda _: result)
        ranks = rank_of_device(made, request.num_devices)
        return PlanToRun(made, answered.request, ranks, result, answered.notes)
    answered = choose_schedule(
        request, question.schedule, lambda asked: search(asked, question.planner)
    )
    plan, request, notes = answered.plan, answered.request, answered.notes
    if question.uses_all_devices and (full := fuller(plan, request)) != plan:
        notes += (why_fuller(plan, full, request),)
        plan = full
    plan = with_loss_on(plan, request.num_devices - 1, request)
    ranks = rank_of_device(plan, request.num_devices)
    return PlanToRun(*by_rank(plan, request), ranks, answered.result, notes)
