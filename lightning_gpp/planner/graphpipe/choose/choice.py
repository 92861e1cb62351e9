"""The search over spaces: micro-batch sizes and replicas, each a question for the dynamic program.

Algorithm 1 of GraphPipe (arXiv 2406.17145, section 5.2) for every micro-batch size. Spaces with the
least lower bounds of a step come first. The plan with the smallest bottleneck is not always the
fastest: one with fewer stages on its longest path warms up and drains sooner. So all that is found
on the way to the smallest bottleneck is judged, too, and what is found at slightly larger ones.

What a bound rules out is left out; of the rest, as much is searched as :data:`BUDGET` allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.graphpipe.candidates.found_stage import FoundStage
from lightning_gpp.planner.graphpipe.candidates.search import Candidate, placed
from lightning_gpp.planner.graphpipe.choose.least import LeastStep, least_step
from lightning_gpp.planner.graphpipe.choose.limits import Divisions, Found
from lightning_gpp.planner.graphpipe.choose.result import NUM_RANKED, RankedPlan, ranked_plans
from lightning_gpp.planner.graphpipe.problem import Problem
from lightning_gpp.planner.graphpipe.space.space import Space
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation

BUDGET = 250_000
"""Micro-batches of devices that a search may play, about a second; other work counts, too."""

TRIED, BOUNDED = 3, 60
"""A stage that the dynamic program tries, or a plan has, takes as long as playing so many."""

MOST_OF_BUDGET = 8
"""The search for one limit is given up at this part of the budget: there are others to look for."""

FEW_UNITS = 128
"""Spaces with more micro-batches are looked at last: they take long to play, and win rarely."""

STAGES_IN_A_ROW = 4
"""Depth of a plan as it is guessed, to begin with sizes of micro-batches that are likely."""

SLOWER = (1.03, 1.1, 1.3)
"""Limits, as multiples of the smallest bottleneck, at which plans that fill sooner are sought."""


class Choice:
    """Judges what searches find and keeps the best.

    Args:
        request: the question.
        name: of the planner.
        is_chain: whether every stage waits for the one before it.

    Attributes:
        best_s: step time of the best plan so far.
    """

    def __init__(self, request: PlanRequest, name: str, *, is_chain: bool) -> None:
        self._request = request
        self._name = name
        self._is_chain = is_chain
        self._judged: dict[object, PlanEvaluation] = {}
        self._pending: list[Candidate] = []
        self._seen: set[tuple[float, tuple[FoundStage, ...]]] = set()
        self._spent = 0
        self.best_s = math.inf

    def search(self, problems: Iterable[Problem]) -> None:
        """Looks at the spaces of some problems, those first that promise most."""
        looks = [
            (least_step(problem, space), problem, space)
            for problem in problems
            for space in spaces(problem)
        ]
        for least, problem, space in sorted(looks, key=_promise):
            if least.step_s < self.best_s and self._spent < BUDGET:
                self._look(least, problem, space)

    def _look(self, least: LeastStep, problem: Problem, space: Space) -> None:
        """Looks at divisions of one space that may beat the best step."""
        divisions = Divisions(space, BUDGET / TRIED / MOST_OF_BUDGET)
        best: Found | None = None
        for found in divisions.narrowed(least.bottleneck_s(self.best_s)):
            if found:
                best = found
                self._judge(problem, space, found.divisions)
            if least.bottleneck_s(self.best_s) < divisions.low_s:
                break
        if best is None:
            slower: Sequence[float] = ()
        else:
            slower = [factor * best.seconds_per_sample for factor in SLOWER]
        for limit_s in slower if not divisions.is_spent else ():
            if limit_s <= least.bottleneck_s(self.best_s) and (found := divisions.at(limit_s)):
                self._judge(problem, space, found.divisions)
        self._spent += TRIED * divisions.num_tried

    def search_tight(self, problem: Problem) -> None:
        """Looks for any division, however slow, and then for a fast one, of every size.

        Args:
            problem: it tries all divisions, for a memory that hardly any of them fits into.
        """
        for size in problem.request.microbatch_sizes:
            space = problem.space(size)
            divisions = Divisions(space)
            for found in (divisions.at(math.inf), divisions.smallest()):
                self._judge(problem, space, found.divisions if found else ())

    def _judge(
        self, problem: Problem, space: Space, divisions: Iterable[tuple[FoundStage, ...]]
    ) -> None:
        """Judges divisions that may be better than the best one, the most promising first."""
        size = space.rates.microbatch_size
        new = [stages for stages in divisions if (size, stages) not in self._seen]
        self._seen.update((size, stages) for stages in new)
        some = [one for stages in new for one in self._placed(problem, stages, size)]
        for candidate in sorted(some, key=lambda one: one.least_s):
            if candidate.least_s < self.best_s:
                self._evaluate(candidate)
            else:
                self._pending.append(candidate)

    def _placed(
        self, problem: Problem, stages: Sequence[FoundStage], size: float
    ) -> Iterator[Candidate]:
        self._spent += BOUNDED * len(stages)
        return placed(
            problem, stages, size, self._name, is_chain=self._is_chain, enough_s=self.best_s
        )

    def _evaluate(self, candidate: Candidate) -> None:
        found = self._judged[candidate.plan] = candidate.evaluation()
        self._spent += sum(
            round(self._request.minibatch_size / one.microbatch_size) * one.stage.num_replicas
            for one in found.stages
        )
        if found.is_feasible:
            self.best_s = min(self.best_s, found.step_s)

    def finish(self) -> list[PlanEvaluation]:
        """All evaluated plans that fit into memory, best first."""
        fitting = (found for found in self._judged.values() if found.is_feasible)
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


def spaces(problem: Problem) -> Iterator[Space]:
    """The spaces of a problem: stages all have as many replicas, or any, or replicas take turns."""
    for size in problem.request.microbatch_sizes:
        yield problem.space(size)
        for count in problem.request.replica_counts(max(problem.available)):
            if count == 1 or not size % count:
                yield problem.space(size, num_replicas=count)
        if problem.can_take_turns:
            yield problem.space(size, take_turns=True)


def _promise(look: tuple[LeastStep, Problem, Space]) -> tuple[bool, bool, float]:
    """Spaces of equal replicas first, which are searched in no time, then what promises most."""
    _, _, space = look
    samples = (space.num_units + STAGES_IN_A_ROW) * space.rates.microbatch_size
    return space.num_units > FEW_UNITS, len(space.crews) > 1, space.lower_bound_s * samples
