"""A planner's answer to a question, and how long it took."""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import dataclass
from functools import partial

from lightning_gpp.common.progress import doing
from lightning_gpp.jobs.search.time_limit import OutOfTimeError, call_within
from lightning_gpp.planner import PLANNERS, PlanEvaluation, PlanRequest, evaluate_plan
from lightning_gpp.planner.message_bytes import message_bytes
from lightning_gpp.planner.plan_to_run import PlanQuestion, plan_to_run
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
        request: the question that its plan answers, with its schedule; None where it found none.
        failure: why it found none.
        next_best: the plans that it ranks next, where it says.
        notes: what to know of its search, where it says.
        plan_notes: why it is not its own plan with the schedule that is used by default.
        message_bytes: that devices send in a step of its plan; None where it found none.
    """

    planner: str
    evaluation: PlanEvaluation | None
    search_s: float
    request: PlanRequest | None = None
    failure: str = ""
    next_best: tuple[PlanEvaluation, ...] = ()
    notes: tuple[str, ...] = ()
    plan_notes: tuple[str, ...] = ()
    message_bytes: float | None = None

    @property
    def schedule(self) -> str:
        """Name of the schedule that runs its plan; empty where it found none."""
        return "" if self.request is None else self.request.schedule

    def as_alternative(self) -> Alternative:
        """The answer beside another one."""
        return Alternative(self.planner, self.evaluation, self.failure)

    def next_alternatives(self) -> list[Alternative]:
        """Its own next best plans."""
        return [
            Alternative(f"{self.planner}, {number}.", evaluation)
            for number, evaluation in enumerate(self.next_best, start=2)
        ]


def search(question: PlanQuestion, limit_s: float | None = None) -> Searched:
    """The plan that training would run; that there is none is an answer, too.

    Args:
        question: the question.
        limit_s: seconds after which the search is ended, in a process of its own; None lets it
            search as long as it likes.

    Raises:
        ValueError: there is no such planner, the limit makes no sense, or a plan made by hand
            cannot run.
        RuntimeError: the search failed, which is a fault of the planner.
    """
    if question.plan is not None:
        return timed_answer(question)
    check_planner(question.planner)
    if limit_s is not None and not limit_s > 0:
        raise ValueError(f"a search needs a time limit above 0 seconds, or none, got {limit_s}")
    say = partial(print, file=sys.stderr, flush=True)
    with doing(f"Planning by {question.planner}", say):
        try:
            if limit_s is None:
                return quiet_search(question)
            return call_within(limit_s, quiet_search, question)
        except OutOfTimeError as error:
            failure = f"{error}; a larger job.limit_s gives it longer"
            return Searched(question.planner, None, limit_s or 0.0, failure=failure)


def quiet_search(question: PlanQuestion) -> Searched:
    """A search that says nothing of its progress; see :func:`search`."""
    gc.collect()  # what others left behind is not the search's
    start_s = time.perf_counter()
    try:
        return timed_answer(question)
    except ValueError as error:
        search_s = time.perf_counter() - start_s
        return Searched(question.planner, None, search_s, failure=str(error))


def timed_answer(question: PlanQuestion) -> Searched:
    """The plan that training would run, evaluated.

    Raises:
        ValueError: there is none.
    """
    start_s = time.perf_counter()
    answer = plan_to_run(question)
    search_s = time.perf_counter() - start_s
    is_made = question.plan is not None
    return Searched(
        answer.plan.planner if is_made else question.planner,
        evaluate_plan(answer.plan, answer.request),
        0.0 if is_made else search_s,
        answer.request,
        next_best=tuple(other.evaluation for other in answer.result.ranked[1 : 1 + NUM_NEXT]),
        notes=answer.result.notes,
        plan_notes=answer.notes,
        message_bytes=message_bytes(answer.plan, answer.request),
    )


def check_planner(planner: str) -> None:
    """Raises ValueError, naming the known planners, where there is none of this name."""
    if planner not in PLANNERS:
        raise ValueError(f"unknown planner {planner!r}; known planners: {', '.join(PLANNERS)}")
