"""Which schedule runs a plan where the user named none: ``gpipe`` if it fits, else ``1f1b``.

Stages that hold the activations of all micro-batches let the user's step run once on the whole
mini-batch, so any loss is exact, and take as long (GPipe, arXiv 1811.06965). What they need is
memory. So ``1f1b`` is chosen only where there is no plan otherwise, and never because it would be
faster: a plan of ``gpipe`` with smaller micro-batches or fewer replicas is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_gpp.common.units_of_measure import bytes_text
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.does_not_fit import (
    HOLDS_ALL,
    HOLDS_FEW,
    MEAN_OVER_SAMPLES,
    DoesNotFitError,
)
from lightning_gpp.planner.graphpipe import SearchResult
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.step_time.evaluate import plan_devices


@dataclass(frozen=True, slots=True)
class Answered:
    """A plan, and the question that it answers.

    Attributes:
        result: the plan, with what its planner says of the search.
        request: the question, with the schedule that runs the plan.
        notes: why the schedule is not the one that is used where memory allows.
    """

    result: SearchResult
    request: PlanRequest
    notes: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.result.best


def choose_schedule(
    request: PlanRequest, schedule: str | None, search: Callable[[PlanRequest], SearchResult]
) -> Answered:
    """The plan of a search, with the schedule that runs it.

    Args:
        request: the question; its own schedule plays no part.
        schedule: the schedule that the user asked for; None chooses.
        search: answers the question for a schedule. It may raise :class:`DoesNotFitError`, or
            answer with a plan that does not fit.

    Returns:
        Where nothing fits with either schedule but the search has an answer, that with ``gpipe``.

    Raises:
        ValueError: of the search; where neither schedule fits that of ``1f1b``, which needs less.
    """
    if schedule is not None:
        asked = request.scheduled(schedule)
        return Answered(search(asked), asked)
    with_all = replace(request, schedule=HOLDS_ALL)
    with_few = replace(request, schedule=HOLDS_FEW)
    first = _searched(with_all, search)
    if first is not None and _fits(first.best, with_all):
        return Answered(first, with_all)
    second = search(with_few)
    if first is not None and not _fits(second.best, with_few):
        return Answered(first, with_all)
    if _fits(second.best, with_all):  # the first search has missed it
        return Answered(second, with_all)
    return Answered(second, with_few, (_why_few(second.best, with_all),))


def _searched(
    request: PlanRequest, search: Callable[[PlanRequest], SearchResult]
) -> SearchResult | None:
    """What a search finds; None where nothing fits into memory."""
    try:
        return search(request)
    except DoesNotFitError:
        return None


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
