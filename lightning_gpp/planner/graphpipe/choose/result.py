"""The best of all candidates, by the time of the whole step, and what became of the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import geometric_mean

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.graphpipe.candidates.search import Candidate, data_parallel, placed
from lightning_gpp.planner.graphpipe.choose.least import LeastSteps
from lightning_gpp.planner.graphpipe.choose.limits import Divisions
from lightning_gpp.planner.graphpipe.choose.look import HOPELESS, Look
from lightning_gpp.planner.graphpipe.problem import Problem
from lightning_gpp.planner.graphpipe.space.crew import Crew
from lightning_gpp.planner.graphpipe.space.space import Space
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation

STAGES_IN_A_ROW = 4
"""Guess of the depth of a plan, to begin with micro-batch sizes that are likely."""

PATIENCE = 2
"""In larger models, micro-batch sizes that may be tried in vain, one after the other."""

QUICK = 48
"""Models in a line of up to so many units are searched so quickly that all sizes are tried."""

FEW_DEVICES = 8
"""On more devices (in a line, twice as many), taking turns is left to the local search."""

FEW_UNITS = 128
"""Spaces with more micro-batches than these, which take long to play, are looked at last."""

MANY_PLAYED = 400_000
"""They are left out of the quick look after so many micro-batches of stages have been played."""

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
        best: the plan with the shortest step.
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


class Choice:
    """Evaluates candidates and keeps what it saw.

    Args:
        request: the question.
        problem: the model as it is, with its branches.

    Attributes:
        best_s: step time of the best plan so far.
    """

    def __init__(self, request: PlanRequest, problem: Problem) -> None:
        self._request = request
        layout = problem.layout
        self._tries_all = not layout.root.blocks and len(layout.order) <= QUICK
        self._seen: dict[Plan, PlanEvaluation] = {}
        self._pending: list[Candidate] = []
        self._best_size: float | None = None
        self._num_played = 0
        self._guesses: dict[tuple[object, ...], float] = {}  # bottleneck over its lower bound
        self._slowest: dict[tuple[int, float], float] = {}
        self._best_replicas = 1.0
        self._one_stage: set[tuple[float, tuple[Crew, ...]]] = set()
        self._least_steps = LeastSteps()
        self.best_s = math.inf

    def search_alike(self, problem: Problem, name: str, *, is_chain: bool) -> None:
        """Looks at divisions whose stages all have as many replicas: quick, and often good."""
        counts = problem.request.replica_counts(max(problem.available))
        spaces = [
            problem.space(size, num_replicas=count)
            for size in problem.request.microbatch_sizes
            for count in counts
            if not size % count or count == 1
        ]
        for space in sorted(spaces, key=lambda one: (one.num_units > FEW_UNITS, _promise(one))):
            if space.num_units > FEW_UNITS and self._num_played > MANY_PLAYED:
                break
            self._look(problem, space, name, is_chain=is_chain)

    def search(self, problem: Problem, name: str, *, is_chain: bool) -> None:
        """Looks at micro-batch sizes, those near the best one so far first.

        In small models all are looked at, those first that promise the shortest step.
        """
        sizes = problem.request.microbatch_sizes
        families = [[problem.space(size) for size in sizes]]
        most = FEW_DEVICES if problem.layout.root.blocks else 2 * FEW_DEVICES
        is_quick = families[0][0].is_small or self._request.num_devices <= most
        is_large = families[0][0].is_large
        if problem.can_take_turns and (is_quick or is_chain) and not is_large:
            families.append([problem.space(size, take_turns=True) for size in sizes])
        for spaces in families:
            for space in spaces:
                self._look_at_one_stage(problem, space, name, is_chain=is_chain)
        for spaces in families:
            self._look_at_sizes(problem, spaces, name, is_chain=is_chain)

    def _look_at_one_stage(
        self, problem: Problem, space: Space, name: str, *, is_chain: bool
    ) -> None:
        """Looks at the whole model as one stage, which is the same in a chain and in a tree."""
        key = space.rates.microbatch_size, tuple(space.crews)
        if key not in self._one_stage:
            self._one_stage.add(key)
            self._consider(data_parallel(problem, space, name, is_chain=is_chain))

    def search_tight(self, problem: Problem, name: str, *, is_chain: bool) -> None:
        """Looks for any division, however slow, and then for a fast one, of every size.

        Args:
            problem: it tries all divisions, for a memory that hardly any of them fits into.
            name: of the planner.
            is_chain: whether every stage waits for the one before it.
        """
        for size in problem.request.microbatch_sizes:
            divisions = Divisions(problem.space(size))
            if (any_found := divisions.at(math.inf)) is None:
                continue
            best = divisions.with_smallest_bottleneck(any_found.seconds_per_sample)
            for stages in {*any_found.divisions, *(best or any_found).divisions}:
                self._consider(placed(problem, stages, size, name, is_chain=is_chain))

    def _look_at_sizes(
        self, problem: Problem, spaces: Sequence[Space], name: str, *, is_chain: bool
    ) -> None:
        in_vain = 0
        for space in sorted(spaces, key=_promise if spaces[0].is_small else self._far_from_best):
            if in_vain >= PATIENCE and not self._tries_all:
                break
            before_s = self.best_s
            least_s = self._look(problem, space, name, is_chain=is_chain)
            if self.best_s < before_s:
                in_vain = 0
            elif self._best_size is not None:
                is_hopeless = least_s > HOPELESS * self.best_s and not space.is_small
                in_vain += PATIENCE if is_hopeless else 1

    def _look(
        self,
        problem: Problem,
        space: Space,
        name: str,
        *,
        is_chain: bool,
    ) -> float:
        """Looks at one space.

        Returns:
            The shortest step that it may hold, as far as was looked.
        """
        before_s = self.best_s
        look = Look(problem, space, name, self._consider, self._least_steps, is_chain=is_chain)
        look.run(self._guess(problem, space))
        if look.slowest_s < math.inf and space.lower_bound_s:
            self._guesses[self._key(problem, space)] = look.slowest_s / space.lower_bound_s
            key = id(problem), space.rates.microbatch_size
            self._slowest[key] = min(look.slowest_s, self._slowest.get(key, math.inf))
        if self.best_s < before_s:
            stages = self.finish()[0].stages
            self._best_size = geometric_mean(stage.microbatch_size for stage in stages)
            self._best_replicas = geometric_mean(stage.stage.num_replicas for stage in stages)
        return look.least_s

    def _guess(self, problem: Problem, space: Space) -> float:
        """How many times its lower bound the bottleneck of a space may be.

        As much as of the last space like it, or what was found with the same micro-batches.
        """
        known = self._slowest.get((id(problem), space.rates.microbatch_size))
        if space.crews[-1].multiple > 1:
            return math.inf
        if len(space.crews) > 1 and known and space.lower_bound_s:
            return math.sqrt(known / space.lower_bound_s)
        return self._guesses.get(self._key(problem, space), 1.0)

    def _key(self, problem: Problem, space: Space) -> tuple[object, ...]:
        """Equal for spaces whose bottlenecks are about as far above their lower bounds."""
        is_one_crew, takes_turns = len(space.crews) == 1, space.crews[-1].multiple > 1
        return bool(problem.layout.root.blocks), space.crews[0], is_one_crew, takes_turns

    def _far_from_best(self, space: Space) -> tuple[float, float]:
        """Micro-batch sizes near the one that was best in an earlier search come first."""
        size = space.rates.microbatch_size
        best = self._best_size or size
        if space.crews[-1].multiple > 1:
            size *= self._best_replicas
        return abs(math.log2(size / best)), _promise(space)

    def finish(self) -> list[PlanEvaluation]:
        """All evaluated plans that fit into memory, best first."""
        fitting = (found for found in self._seen.values() if found.is_feasible)
        return sorted(fitting, key=lambda found: (found.step_s, found.peak_memory_bytes))

    def ranked(self, first: Sequence[PlanEvaluation]) -> tuple[RankedPlan, ...]:
        """Some plans and what was found beside them, with a word on each.

        Args:
            first: evaluated plans, the best one first; the others are none better than it.
        """
        for candidate in sorted(self._pending, key=lambda one: one.least_s):
            if len(first) + len(self.finish()) > NUM_RANKED:
                break
            self._evaluate(candidate)
        others = dict.fromkeys([*first[1:], *self.finish()])
        others.pop(first[0], None)
        return ranked_plans([first[0], *sorted(others, key=lambda one: one.step_s)])

    def _consider(self, some: Iterable[Candidate]) -> float:
        """Evaluates those that may be better than the best one, the most promising first.

        Returns:
            Seconds of the best step then.
        """
        for candidate in sorted(some, key=lambda one: one.least_s):
            if candidate.least_s < self.best_s:
                self._evaluate(candidate)
            else:
                self._pending.append(candidate)
        return self.best_s

    def _evaluate(self, candidate: Candidate) -> None:
        found = candidate.evaluation()
        self._seen.setdefault(found.plan, found)
        self._num_played += sum(
            round(self._request.minibatch_size / stage.microbatch_size) for stage in found.stages
        )
        if found.is_feasible:
            self.best_s = min(self.best_s, found.step_s)


def _promise(space: Space) -> float:
    """A step that may be had: a bottleneck like the lower bound, and some stages in a row."""
    samples = (space.num_units + STAGES_IN_A_ROW) * space.rates.microbatch_size
    return space.lower_bound_s * samples


def ranked_plans(found: Sequence[PlanEvaluation]) -> tuple[RankedPlan, ...]:
    """The first plans with a word on each."""
    best = found[0]
    return tuple(RankedPlan(one.plan, one, _note(one, best)) for one in found[:NUM_RANKED])


def _note(one: PlanEvaluation, best: PlanEvaluation) -> str:
    form = (
        f"{len(one.stages)} stages, depth {one.depth}, "
        f"micro-batches of {one.stages[0].microbatch_size:g}"
    )
    if one is best:
        return f"{form}: the shortest step"
    longer = _longer(one.step_s, best.step_s)
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
