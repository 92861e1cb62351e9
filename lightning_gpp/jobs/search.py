"""Runs planners, within a time limit.

A search is pure Python (or numpy) for minutes and looks at no clock, so with a limit it runs in a
process of its own, which can be ended.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from lightning_gpp.common.progress import doing
from lightning_gpp.planner import PLANNERS, PlanEvaluation, PlanRequest, evaluate_plan
from lightning_gpp.planner.plan_to_run import PlanQuestion, PlanToRun, plan_to_run

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """The plan that training would run, and how it was found.

    Attributes:
        question: the question.
        answer: the plan, and the planner's notes on its search.
        evaluation: predicted time and memory of the plan.
        search_s: seconds of the search.
    """

    question: PlanQuestion
    answer: PlanToRun
    evaluation: PlanEvaluation
    search_s: float

    @property
    def planner(self) -> str:
        """Name of the planner that made the plan."""
        made = self.question.plan is not None
        return self.answer.plan.planner if made else self.question.planner

    @property
    def request(self) -> PlanRequest:
        """The question that the plan answers, with the schedule that runs it."""
        return self.answer.request

    @property
    def metrics(self) -> dict[str, float]:
        """The plan in numbers, by which a sweep compares it."""
        found = self.evaluation
        return {
            "step_s": found.minibatch_s,
            "samples_per_s": found.throughput,
            "num_stages": found.plan.num_stages,
            "depth": found.depth,
            "peak_memory_bytes": found.peak_memory_bytes,
            "search_s": self.search_s,
        }


def search(question: PlanQuestion, limit_s: float | None = None) -> FoundPlan:
    """The plan that training would run.

    Args:
        question: the question.
        limit_s: seconds after which the search is ended, in a process of its own; None lets it
            search as long as it likes.

    Raises:
        ValueError: there is no such planner or no plan, or none was found in time.
    """
    check_planner(question.planner)
    if question.plan is not None:
        return find(question)
    with doing(f"Planning by {question.planner}", partial(print, file=sys.stderr, flush=True)):
        return call_within(limit_s, find, question)


def find(question: PlanQuestion) -> FoundPlan:
    """:func:`search` without limits."""
    gc.collect()  # what others left behind is not the search's
    start_s = time.perf_counter()
    answer = plan_to_run(question)
    search_s = time.perf_counter() - start_s if question.plan is None else 0.0
    return FoundPlan(question, answer, evaluate_plan(answer.plan, answer.request), search_s)


def check_planner(planner: str) -> None:
    """Raises ValueError, naming the known planners, where there is none of this name."""
    if planner not in PLANNERS:
        raise ValueError(f"unknown planner {planner!r}; known planners: {', '.join(PLANNERS)}")


class OutOfTimeError(ValueError):
    """A call took longer than its limit."""


def call_within(limit_s: float | None, function: Callable[..., Result], *args: Any) -> Result:
    """Calls a function within a time limit, in a new process unless there is no limit.

    Args:
        limit_s: seconds after which the process is ended, its start included; None: never.
        function: of the top level of a module; it, the arguments and the result are pickled.
        args: its arguments.

    Raises:
        OutOfTimeError: there was no result in time.
        ValueError: of the function; that is an answer, too.
    """
    if limit_s is None:
        return function(*args)
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # which ends its process
        try:
            return pool.apply_async(function, args).get(limit_s)
        except multiprocessing.TimeoutError:
            raise OutOfTimeError(f"no answer within {limit_s:g} s; raise job.limit_s") from None
