"""A planner's answer to a question, and how long it took."""

from __future__ import annotations

import time
from dataclasses import dataclass

from lightning_gpp.planner import PLANNERS, PlanEvaluation, PlanRequest, answer, evaluate_plan
from lightning_gpp.planner.explain import Alternative


@dataclass(frozen=True, slots=True)
class Searched:
    """What a planner found.

    Attributes:
        planner: its name.
        evaluation: what its plan would do; None where it found none.
        search_s: seconds that it searched.
        failure: why it found none.
    """

    planner: str
    evaluation: PlanEvaluation | None
    search_s: float
    failure: str = ""

    def as_alternative(self) -> Alternative:
        """The answer beside another one."""
        return Alternative(self.planner, self.evaluation, self.failure)


def search(planner: str, request: PlanRequest) -> Searched:
    """Asks a planner; what it cannot plan is an answer too.

    Raises:
        ValueError: there is no such planner.
    """
    check_planner(planner)
    start_s = time.perf_counter()
    try:
        plan = answer(request, planner)
    except ValueError as error:
        return Searched(planner, None, time.perf_counter() - start_s, str(error))
    search_s = time.perf_counter() - start_s
    return Searched(planner, evaluate_plan(plan, request), search_s)


def check_planner(planner: str) -> None:
    """Raises ValueError, naming the known planners, where there is none of this name."""
    if planner not in PLANNERS:
        raise ValueError(f"unknown planner {planner!r}; known planners: {', '.join(PLANNERS)}")
