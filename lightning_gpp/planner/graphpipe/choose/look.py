"""A look at one micro-batch size: divisions whose step may be the shortest.

Algorithm 1 of GraphPipe (arXiv 2406.17145, section 5.2) for every micro-batch size. The plan with
the smallest bottleneck is not always the fastest: one with fewer stages on its longest path warms
up and drains sooner. So what is found on the way to the smallest bottleneck is considered, too, and
the shallowest plans at slightly slower bottlenecks; and where the pipeline takes so long to fill
that a faster bottleneck would not help, the smallest one is not sought.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lightning_gpp.planner.graphpipe.candidates.found_stage import FoundStage
from lightning_gpp.planner.graphpipe.candidates.search import Candidate, placed
from lightning_gpp.planner.graphpipe.choose.least import LeastSteps
from lightning_gpp.planner.graphpipe.choose.limits import Divisions, Found
from lightning_gpp.planner.graphpipe.problem import Problem
from lightning_gpp.planner.graphpipe.space.space import Space

LEAST_FILL = 0.5
"""In larger models, micro-batches' time that a pipeline is taken to lose at least by filling."""

FILL_CHANGE = 5.0
"""How much less it may take to fill a pipeline whose bottleneck is a little faster.

Where it is faster by a tenth, filling is taken to need at least 1 - 5 / 10 of the time.
"""

SLOWER_FILL_CHANGE = 7.0
"""The same where the bottleneck is slower: then it may have fewer stages in a row."""

HOPELESS = 1.15
"""Where steps take so many times the best one at least, nothing else is sought near them."""

SLOWER = (1.03, 1.1, 1.3)
"""Limits, as multiples of the smallest bottleneck, at which shallower plans are sought."""


class Look:
    """Divisions for one micro-batch size that may beat a step time.

    Args:
        problem: what the space is of.
        space: what to divide.
        name: of the planner.
        is_chain: whether every stage waits for the one before it.
        consider: takes candidates; gives the step to beat from then on.
        least_steps: finds lower bounds of steps.

    Attributes:
        slowest_s: seconds per sample of the slowest stage, where it is the fastest; infinite where
            nothing was found.
        least_s: the shortest step that what was found may take; infinite likewise.
    """

    def __init__(
        self,
        problem: Problem,
        space: Space,
        name: str,
        consider: Callable[[Sequence[Candidate]], float],
        least_steps: LeastSteps,
        *,
        is_chain: bool,
    ) -> None:
        self._least_steps = least_steps
        self._problem = problem
        self._space = space
        self._name = name
        self._is_chain = is_chain
        self._consider = consider
        self._best_s = consider(())
        self._minibatch_size = problem.request.minibatch_size
        self._fill_s: dict[Found, float] = {}
        self._seen: dict[tuple[FoundStage, ...], float] = {}
        self.slowest_s = math.inf
        self.least_s = math.inf

    def run(self, guess: float = 1.0) -> None:
        """Looks for candidates.

        Args:
            guess: how many times its lower bound the smallest bottleneck may be.
        """
        space = self._space
        least_fill = 0 if space.is_small else LEAST_FILL * space.rates.microbatch_size
        samples = self._minibatch_size + least_fill
        if space.lower_bound_s * samples > self._best_s:
            return
        least = self._least_steps(self._problem, space)
        if least.step_s > self._best_s:
            return
        divisions = Divisions(space)
        at_most_s = min(self._best_s / samples, least.bottleneck_s(self._best_s))
        best = divisions.with_smallest_bottleneck(at_most_s, guess=guess, is_worth=self._is_worth)
        if best is None:
            return
        self.slowest_s = best.seconds_per_sample
        for factor in SLOWER:
            limit_s = best.seconds_per_sample * factor
            if limit_s * samples > self._best_s:
                break
            is_worth = self._is_slower_worth(divisions, best, limit_s)
            if is_worth and (slower := divisions.at(limit_s)) is not None:
                self._note(slower)

    def _is_slower_worth(self, divisions: Divisions, best: Found, limit_s: float) -> bool:
        """Whether plans with a slower bottleneck than the best may fill that much sooner."""
        if self._space.is_small:
            return True
        share = 1 - SLOWER_FILL_CHANGE * (limit_s / best.seconds_per_sample - 1)
        middle_s = (limit_s + best.seconds_per_sample) / 2 * self._minibatch_size
        least_s = middle_s + max(0.0, share) * self._fill_s[best]
        return least_s < self._best_s and not divisions.is_searched(limit_s)

    def _is_worth(self, found: Found, low_s: float) -> bool:
        """Whether bottlenecks between a limit and that of some divisions are of interest."""
        self._note(found)
        if self._space.is_small:
            return True
        slowest_s = found.seconds_per_sample
        share = 1 - FILL_CHANGE * (1 - low_s / slowest_s)
        least_s = low_s * self._minibatch_size + max(0.0, share) * self._fill_s[found]
        return least_s < self._best_s

    def _note(self, found: Found) -> None:
        """Has the candidates of some divisions considered, and notes how long they take."""
        if found in self._fill_s:
            return
        new: list[Candidate] = []
        for stages in found.divisions:
            if stages not in self._seen:
                own = self._placed(stages)
                self._seen[stages] = min(candidate.least_s for candidate in own)
                new += own
                if not self._is_alike(stages):
                    self.least_s = min(self.least_s, self._seen[stages])
        self._fill_s[found] = min(
            self._seen[stages] - self._minibatch_size * max(s.seconds_per_sample for s in stages)
            for stages in found.divisions
        )
        self._best_s = self._consider(new)

    def _is_alike(self, stages: Sequence[FoundStage]) -> bool:
        """Whether divisions of another space are like this one, as all stages have one size."""
        return len(self._space.crews) > 1 and len({stage.crew for stage in stages}) == 1

    def _placed(self, stages: Sequence[FoundStage]) -> list[Candidate]:
        """The candidates of some stages; of hopeless ones with one placement alone."""
        found = []
        for candidate in placed(
            self._problem,
            stages,
            self._space.rates.microbatch_size,
            self._name,
            is_chain=self._is_chain,
            enough_s=self._best_s,
        ):
            found.append(candidate)
            if candidate.least_s > HOPELESS * self._best_s:
                break
        return found
