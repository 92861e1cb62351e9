"""A planner's answer to a question, and how long it took."""

from __future__ import annotations

import gc
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from lightning_gpp.jobs.search.time_limit import OutOfTimeError, call_within
from lightning_gpp.planner import (
    PLANNERS,
    PlanEvaluation,
    PlanRequest,
    ask_scheduled,
    evaluate_plan,
)
from lightning_gpp.planner.message_bytes import message_bytes
from lightning_gpp.progress import doing
from lightning_gpp.reports.plan.explain import Alternative

NUM_NEXT = 3
"""Next best plans that are kept."""


@dataclass(frozen=True, slots=True)
class Searched:
    """What a planner found.

    Attributes:
        planner: its name.
        evaluation: what its plan would do; None where it found none.
        search_s: seconds that it searched.
        failure: why it found none.
        next_best: the plans that it ranks next, where it says.
        notes: what to know of its search, where it says.
        schedule: name of the schedule that runs its plan; empty where it found none.
        schedule_notes: why it is not the one that is used where memory allows.
        message_bytes: that devices send in a step of its plan; None where it found none.
    """

    planner: str
    evaluation: PlanEvaluation | None
    search_s: float
    failure: str = ""
    next_best: tuple[PlanEvaluation, ...] = ()
    notes: tuple[str, ...] = ()
    schedule: str = ""
    schedule_notes: tuple[str, ...] = ()
    message_bytes: float | None = None

    def as_alternative(self) -> Alternative:
        """The answer beside another one."""
        return Alternative(self.planner, self.evaluation, self.failure)

    def next_alternatives(self) -> list[Alternative]:
        """Its own next best plans."""
        return [
            Alternative(f"{self.planner}, {number}.", evaluation)
            for number, evaluation in enumerate(self.next_best, start=2)
        ]


def search(planner: str, request: PlanRequest, schedule: str | None) -> Searched:
    """Asks a planner; what it cannot plan is an answer too.

    Args:
        planner: its name.
        request: the question; its own schedule plays no part.
        schedule: of the plan; None leaves it to what fits into memory.

    Raises:
        ValueError: there is no such planner.
    """
    check_planner(planner)
    with _waiting_for(planner):
        return quiet_search(planner, request, schedule)


def _waiting_for(planner: str) -> AbstractContextManager[None]:
    return doing(f"Planning by {planner}", partial(print, file=sys.stderr, flush=True))


def quiet_search(planner: str, request: PlanRequest, schedule: str | None) -> Searched:
    """A search that says nothing of its progress; see :func:`search`."""
    gc.collect()  # what others left behind is not the search's
    start_s = time.perf_counter()
    try:
        answered = ask_scheduled(request, planner, schedule)
    except ValueError as error:
        return Searched(planner, None, time.perf_counter() - start_s, str(error))
    search_s = time.perf_counter() - start_s
    result = answered.result
    return Searched(
        planner,
        evaluate_plan(answered.plan, answered.request),
        search_s,
        next_best=tuple(other.evaluation for other in result.ranked[1 : 1 + NUM_NEXT]),
        notes=result.notes,
        schedule=answered.request.schedule,
        schedule_notes=answered.notes,
        message_bytes=message_bytes(answered.plan, answered.request),
    )


def search_within(
    planner: str, request: PlanRequest, schedule: str | None, limit_s: float | None
) -> Searched:
    """Asks a planner, but ends its search at a time limit; that it had no answer is one, too.

    Args:
        planner: its name.
        request: the question; its own schedule plays no part.
        schedule: of the plan; None leaves it to what fits into memory.
        limit_s: seconds; None lets it search as long as it likes.

    Raises:
        ValueError: there is no such planner, or the limit makes no sense.
        RuntimeError: the search failed, which is a fault of the planner.
    """
    check_planner(planner)
    if limit_s is None:
        return search(planner, request, schedule)
    if not limit_s > 0:
        raise ValueError(f"a search needs a time limit above 0 seconds, or none, got {limit_s}")
    try:
        with _waiting_for(planner):
            return call_within(limit_s, quiet_search, planner, request, schedule)
    except OutOfTimeError as error:
        return Searched(planner, None, limit_s, f"{error}; a larger job.limit_s gives it longer")


def check_planner(planner: str) -> None:
    """Raises ValueError, naming the known planners, where there is none of this name."""
    if planner not in PLANNERS:
        raise ValueError(f"unknown planner {planner!r}; known planners: {', '.join(PLANNERS)}")
