"""A planner's answer to a question, and how long it took."""

from __future__ import annotations

import time
from dataclasses import dataclass

from lightning_gpp.planner import PLANNERS, PlanEvaluation, PlanRequest, ask, evaluate_plan
from lightning_gpp.planner.explain import Alternative

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
    """

    planner: str
    evaluation: PlanEvaluation | None
    search_s: float
    failure: str = ""
    next_best: tuple[PlanEvaluation, ...] = ()
    notes: tuple[str, ...] = ()

    def as_alternative(self) -> Alternative:
        """The answer beside another one."""
        return Alternative(self.planner, self.evaluation, self.failure)

    def next_alternatives(self) -> list[Alternative]:
        """Its own next best plans."""
        return [
            Alternative(f"{self.planner}, {number}.", evaluation)
            for number, evaluation in enumerate(self.next_best, start=2)
        ]


def search(planner: str, request: PlanRequest) -> Searched:
    """Asks a planner; what it cannot plan is an answer too.

    Raises:
        ValueError: there is no such planner.
    """
    check_planner(planner)
    start_s = time.perf_counter()
    try:
        result = ask(request, planner)
    except ValueError as error:
        return Searched(planner, None, time.perf_counter() - start_s, str(error))
    search_s = time.perf_counter() - start_s
    return Searched(
        planner,
        evaluate_plan(result.best, request),
        search_s,
        next_best=tuple(other.evaluation for other in result.ranked[1 : 1 + NUM_NEXT]),
        notes=result.notes,
    )


def check_planner(planner: str) -> None:
    """Raises ValueError, naming the known planners, where there is none of this name."""
    if planner not in PLANNERS:
        raise ValueError(f"unknown planner {planner!r}; known planners: {', '.join(PLANNERS)}")
