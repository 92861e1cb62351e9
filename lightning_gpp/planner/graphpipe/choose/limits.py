"""The smallest bottleneck of a space: which limits the dynamic program is asked for.

Algorithm 1 of GraphPipe (arXiv 2406.17145, section 5.2) halves the interval of limits. An answer
says more than yes or no, so fewer questions do: divisions answer for all limits down to what their
slowest stage takes, and where there are none, there are none up to the least limit at which one
more stage would be possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lightning_gpp.planner.graphpipe.candidates.found_stage import FoundStage
from lightning_gpp.planner.graphpipe.candidates.placement import found_stages
from lightning_gpp.planner.graphpipe.divide.partition import LimitedWays
from lightning_gpp.planner.graphpipe.space.space import Space
from lightning_gpp.planner.graphpipe.tolerances import SECONDS

PRECISION = 1.015
"""The binary search ends when the limits are this close; then it tries to beat what it found."""

STEPS = (1.03, 1.1, 1.3)
"""The first steps away from a limit that was too small, or too large, in larger models."""

NEAR = 1.03
"""Limits that differ by no more than this have nearly the same divisions."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Divisions that keep to one limit.

    Attributes:
        limit_s: the limit.
        seconds_per_sample: of the slowest stage of the fastest of them.
        slowest_s: of the slowest stage of any of them: down to this limit they are the same.
        divisions: their stages.
    """

    limit_s: float
    seconds_per_sample: float
    slowest_s: float
    divisions: tuple[tuple[FoundStage, ...], ...]


def _always(found: Found, low_s: float) -> bool:
    return True


class Divisions:
    """The divisions of a space at some limits, with as few searches as possible.

    Attributes:
        low_s: no division keeps to a limit below this one.
        found: what searches found, the smallest limit last.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.low_s = max(space.lower_bound_s * (1 - SECONDS), 1e-18)
        self.found: list[Found] = []

    def at(self, limit_s: float) -> Found | None:
        """The divisions whose stages all keep to a limit per sample; None if there are none."""
        if limit_s < self.low_s or not self.space.may_fit:
            return None
        for known in self.found:
            if known.slowest_s <= limit_s <= known.limit_s:
                return known
        partition = LimitedWays(self.space, limit_s)
        ways = partition.ways()
        if not ways:
            self.low_s = max(limit_s, partition.limit.next_limit_s * (1 - SECONDS))
            return None
        divisions = tuple(tuple(found_stages(way.trace, self.space, limit_s)) for way in ways)
        slowest = [max(stage.seconds_per_sample for stage in stages) for stages in divisions]
        new = Found(limit_s, min(slowest), max(slowest), divisions)
        self.found = sorted([*self.found, new], key=lambda found: -found.limit_s)
        return new

    def is_searched(self, limit_s: float) -> bool:
        """Whether a limit that is nearly this one has been searched."""
        return limit_s < self.low_s or any(
            known.slowest_s / NEAR <= limit_s <= known.limit_s * NEAR for known in self.found
        )

    def with_smallest_bottleneck(
        self,
        at_most_s: float = math.inf,
        *,
        guess: float = 1.0,
        is_worth: Callable[[Found, float], bool] = _always,
    ) -> Found | None:
        """The divisions with the smallest bottleneck; None if larger ones are of no interest.

        Args:
            at_most_s: larger bottlenecks are of no interest.
            guess: how many times the lower bound the bottleneck may be.
            is_worth: is told of divisions, and of a limit below which there are none; says whether
                smaller bottlenecks are of interest.
        """
        best = self._first(at_most_s, guess)
        step = 0
        while best and is_worth(best, self.low_s):
            is_near = best.seconds_per_sample <= self.low_s * PRECISION
            middle_s = math.sqrt(self.low_s * best.seconds_per_sample)
            limit_s = max(best.seconds_per_sample / STEPS[step], middle_s)
            step = min(step + 1, len(STEPS) - 1)
            new = self.at(best.seconds_per_sample * (1 - SECONDS) if is_near else limit_s)
            best = new or best
            if is_near and (new is None or not self.space.is_small):
                if new:
                    is_worth(new, self.low_s)
                break
        return best

    def _first(self, at_most_s: float, guess: float) -> Found | None:
        """Any divisions, at a limit near the guess if there are some."""
        whole_s = min(self.space.rates.least_seconds(crew)[-1] for crew in self.space.crews)
        if not self.space.may_fit:
            return None
        limit_s, step = self.low_s * max(guess, STEPS[0]), 0
        if self.space.is_small and math.isfinite(at_most_s):
            limit_s = at_most_s  # what is found on the way is of use, too
        while self.low_s <= at_most_s:
            if self.low_s > 4 * whole_s:
                limit_s = at_most_s  # none at all once a single device keeps to it
            if (found := self.at(min(limit_s, at_most_s))) is not None:
                return found
            if limit_s >= at_most_s:
                return None
            limit_s = self.low_s * STEPS[step]
            step = min(step + 1, len(STEPS) - 1)
        return None
