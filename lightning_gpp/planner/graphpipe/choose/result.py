"""The best of all candidates, by the time of the whole step, and what became of the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation

NUM_RANKED = 8
"""Plans that a result lists."""


@dataclass(frozen=True, slots=True)
class RankedPlan:
    """A plan that a search looked at.

    Attributes:
        plan: the plan.
        evaluation: what it would do.
        note: why it won or lost, in a few words.
    """

    plan: Plan
    evaluation: PlanEvaluation
    note: str


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        best: the plan with the shortest step, or nearly, and few stages.
        notes: what to know about the search.
        rank: makes ``ranked``; without it there is none.
    """

    best: Plan
    notes: tuple[str, ...] = ()
    rank: Callable[[], tuple[RankedPlan, ...]] = tuple

    @cached_property
    def ranked(self) -> tuple[RankedPlan, ...]:
        """The best plan and the next ones, in this order; they are evaluated when asked for."""
        return self.rank()


def ranked_plans(found: Sequence[PlanEvaluation]) -> tuple[RankedPlan, ...]:
    """The first plans with a word on each.

    Args:
        found: the best one first.
    """
    best = found[0]
    shortest_s = min(one.step_s for one in found)
    return tuple(
        RankedPlan(one.plan, one, _note(one, best, shortest_s)) for one in found[:NUM_RANKED]
    )


def _note(one: PlanEvaluation, best: PlanEvaluation, shortest_s: float) -> str:
    form = (
        f"{len(one.stages)} stages, depth {one.depth}, "
        f"micro-batches of {one.stages[0].microbatch_size:g}"
    )
    if one is best:
        is_shortest = one.step_s <= shortest_s
        return f"{form}: {'the shortest step' if is_shortest else 'as good with fewer stages'}"
    longer = _longer(one.step_s, best.step_s)
    if longer < -1e-9:
        return f"{form}: {-longer:.2%} faster, but has more stages"
    if longer < 1e-9 and one.peak_memory_bytes == best.peak_memory_bytes:
        return f"{form}: as fast"
    if longer < 1e-9:
        return f"{form}: as fast, but needs {_percent(one.peak_memory_bytes, best)} more memory"
    slower = _longer(one.seconds_per_sample, best.seconds_per_sample)
    why = "its bottleneck is slower" if slower > longer / 2 else "it warms up and drains longer"
    return f"{form}: {longer:.1%} slower, as {why}"


def _longer(one_s: float, best_s: float) -> float:
    """By which part of the best one is longer; models whose operators take no time are allowed."""
    if not best_s:
        return math.inf if one_s else 0.0
    return one_s / best_s - 1


def _percent(peak_bytes: int, best: PlanEvaluation) -> str:
    return f"{peak_bytes / max(1, best.peak_memory_bytes) - 1:.1%}"
