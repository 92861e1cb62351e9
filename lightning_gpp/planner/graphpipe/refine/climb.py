"""Local search: from good plans to better ones next to them.

The dynamic program asks for the fewest devices and the least in flight under a limit, with micro-
batches of one size. The shortest step may have stages with micro-batches of other sizes (GraphPipe,
arXiv 2406.17145, section 5.3, has them for every stage), or fewer stages that fill sooner, with the
same bottleneck. So the best plans are changed a little at a time; the estimate ranks the changes,
the evaluation judges the most promising ones, and the first that is better is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from lightning_gpp.planner.graphpipe.candidates.search import Candidate
from lightning_gpp.planner.graphpipe.problem import Problem
from lightning_gpp.planner.graphpipe.refine.division import Divider, Division, division_of
from lightning_gpp.planner.graphpipe.refine.neighbours import (
    merged,
    paced,
    shifted,
    staffed,
    swapped,
)
from lightning_gpp.planner.graphpipe.tolerances import SECONDS
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation

Change = Callable[[Division, Divider, float], Iterable[Division]]
"""A kind of change: all that comes of a division, apart from steps that are sure to be longer."""

SEEDS = 3
"""Plans that are changed, each with other devices for its stages."""

FAR = 1.2
"""Plans with steps so many times the shortest one are left alone."""

LITTLE = 1.001
"""A kind of change that makes the step shorter by less than this factor is left for others."""

IN_LINE = 0.6
"""Models with such a part of their work on the longest way are taken to be in a line."""

FEW_UNITS = 48
"""Up to so many units, models in a line are searched so quickly that there is time for more."""

MANY_DEVICES = 16
"""On more devices, plans of models with branches have many parts: too many changes to try all."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a local search may do.

    Attributes:
        changes: kinds of changes that it tries.
        num_seeds: plans that it changes.
        patience: changes of one kind that it may evaluate in vain.
        num_parts: stages of the changed plans that it estimates, all together.
        num_played: micro-batches of the stages of the plans that it evaluates, all together.
    """

    changes: tuple[Change, ...]
    num_seeds: int
    patience: int
    num_parts: int
    num_played: int


ALL = staffed, merged, paced, shifted, swapped
LARGEST = Budget(ALL, SEEDS, patience=5, num_parts=6_000, num_played=20_000)
LARGE = Budget(ALL, SEEDS, patience=5, num_parts=3_000, num_played=10_000)
MEDIUM = Budget(ALL, SEEDS, patience=5, num_parts=1_200, num_played=6_000)
SMALL = Budget((paced,), 1, patience=4, num_parts=160, num_played=2_000)

PARTS_PER_UNIT = 4
"""More of the small budget for models of many units, which are searched for longer anyway."""


def budget_for(problem: Problem) -> Budget:
    """How much time to spend: much for models in a line, which are searched quickly."""
    units = problem.units
    until: list[float] = []
    for seconds, before in zip(units.compute_s, units.predecessors):
        until.append(seconds + max((until[source] for source in before), default=0.0))
    if max(until) >= IN_LINE * sum(units.compute_s):
        return LARGEST if len(units) <= FEW_UNITS else LARGE
    if problem.request.num_devices <= MANY_DEVICES:
        return MEDIUM
    return replace(SMALL, num_parts=max(SMALL.num_parts, PARTS_PER_UNIT * len(units)))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a search is: a division and its step."""

    division: Division
    step_s: float


@dataclass
class Climb:
    """A local search on one problem, within a budget.

    Attributes:
        divider: makes candidates.
        budget: what it may do.
        found: the plans that were evaluated and fit into memory.
    """

    divider: Divider
    budget: Budget
    found: list[PlanEvaluation] = field(default_factory=list)
    _num_parts: int = 0
    _num_played: int = 0
    _known: dict[Division, list[Candidate]] = field(default_factory=dict)

    def up_from(self, seed: PlanEvaluation) -> None:
        """Changes a plan, one kind of change after the other, until none makes its step shorter."""
        division = division_of(seed.plan, self.divider.problem)
        if division is None:
            return
        self._known[division] = []
        at = _Place(division, seed.step_s)
        in_vain = 0
        while in_vain < len(self.budget.changes):
            for change in self.budget.changes:
                new = self._changed(at, change)
                in_vain = 0 if new.step_s * LITTLE < at.step_s else in_vain + 1
                at = new

    def _changed(self, at: _Place, change: Change) -> _Place:
        """Where changes of one kind lead as long as they help."""
        while (new := self._better(at, change)) is not None:
            helps = new.step_s * LITTLE < at.step_s
            at = new
            if not helps:
                break
        return at

    def _better(self, at: _Place, change: Change) -> _Place | None:
        """A neighbour with a shorter step; None if none of the most promising has one."""
        options = [
            (candidate, near)
            for near in dict.fromkeys(change(at.division, self.divider, at.step_s))
            for candidate in self._candidates(near, at.step_s)
            if candidate.least_s < at.step_s * (1 - SECONDS)
        ]
        options.sort(key=lambda option: option[0].least_s)
        best = at
        for candidate, near in options[: self.budget.patience]:
            if candidate.least_s >= best.step_s or best.step_s * LITTLE < at.step_s:
                break
            step_s = self._step_s(candidate)
            self._known[near] = [one for one in self._known[near] if one is not candidate]
            if step_s < best.step_s * (1 - SECONDS):
                best = _Place(near, step_s)
        return None if best is at else best

    def _candidates(self, division: Division, at_most_s: float) -> list[Candidate]:
        """The candidates of a division that have not been evaluated."""
        found = self._known.get(division)
        if found is None:
            if self._num_parts >= self.budget.num_parts:
                return []
            self._num_parts += len(division.crews)
            found = self._known[division] = [*self.divider.candidates(division, at_most_s)]
        return found

    def _step_s(self, candidate: Candidate) -> float:
        """The step of a candidate; infinite where it does not fit, or the budget is spent."""
        if self._num_played >= self.budget.num_played:
            return math.inf
        found = candidate.evaluation()
        self._num_played += sum(
            round(found.minibatch_size / stage.microbatch_size) for stage in found.stages
        )
        if not found.is_feasible:
            return math.inf
        self.found.append(found)
        return found.step_s


def climbed(
    best: Sequence[PlanEvaluation], others: Sequence[PlanEvaluation], divider: Divider
) -> list[PlanEvaluation]:
    """The best plans, and plans next to them, the shortest step first.

    Args:
        best: plans that fit into memory, the shortest step first.
        others: plans from where it is tried, too.
        divider: makes candidates.
    """
    climb = Climb(divider, budget_for(divider.problem))
    for seed in _seeds([*best, *others], climb.budget.num_seeds):
        climb.up_from(seed)
    plans = {one.plan: one for one in (*best, *climb.found)}
    return sorted(plans.values(), key=lambda one: (one.step_s, one.peak_memory_bytes))


def _seeds(found: Sequence[PlanEvaluation], most: int) -> list[PlanEvaluation]:
    """The best plans with different numbers of devices for their stages."""
    seeds: dict[tuple[int, ...], PlanEvaluation] = {}
    for one in found:
        if len(seeds) < most and one.step_s <= FAR * found[0].step_s:
            seeds.setdefault(tuple(stage.num_replicas for stage in one.plan.stages), one)
    return list(seeds.values())
