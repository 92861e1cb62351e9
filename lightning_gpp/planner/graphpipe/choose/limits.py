"""The smallest bottleneck of a space: which limits the dynamic program is asked for.

Algorithm 1 of GraphPipe (arXiv 2406.17145, section 5.2) halves the interval of limits. An answer
says more than yes or no, so fewer questions do: divisions answer for all limits down to what their
slowest stage takes, and where there are none, there are none up to the least limit at which one
more stage would be possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_gpp.planner.graphpipe.candidates.found_stage import FoundStage
from lightning_gpp.planner.graphpipe.candidates.placement import found_stages
from lightning_gpp.planner.graphpipe.divide.limit import OutOfBudgetError
from lightning_gpp.planner.graphpipe.divide.partition import LimitedWays
from lightning_gpp.planner.graphpipe.space.space import Space
from lightning_gpp.planner.graphpipe.tolerances import SECONDS

PRECISION = 1.015
"""The interval of limits is halved until its ends are this close: a step in a hundred and fifty."""

FIRST = 1.1
"""The first limit is so many times the lower bound: most bottlenecks are that near."""


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


class Divisions:
    """The divisions of a space at some limits, with as few searches as possible.

    Args:
        space: what to divide.
        most_tried: stages that the search for one limit may try.

    Attributes:
        low_s: no division keeps to a limit below this one.
        num_tried: stages that the searches tried.
        is_spent: whether a search for one limit had to be given up.
    """

    def __init__(self, space: Space, most_tried: float = math.inf) -> None:
        self.space = space
        self.low_s = max(space.lower_bound_s * (1 - SECONDS), 1e-18)
        self.num_tried = 0
        self.is_spent = False
        self._most_tried = most_tried
        self._found: list[Found] = []

    def at(self, limit_s: float) -> Found | None:
        """The divisions whose stages all keep to a limit per sample; None if there are none."""
        if limit_s < self.low_s or not self.space.may_fit:
            return None
        for known in self._found:
            if known.slowest_s <= limit_s <= known.limit_s:
                return known
        partition = LimitedWays(self.space, limit_s, self._most_tried)
        try:
            ways = partition.ways()
        except OutOfBudgetError:
            self.is_spent = True
            return None
        finally:
            self.num_tried += partition.limit.num_tried
        if not ways:
            self.low_s = max(limit_s, partition.limit.next_limit_s * (1 - SECONDS))
            return None
        divisions = tuple(tuple(found_stages(way.trace, self.space, limit_s)) for way in ways)
        slowest = [max(stage.seconds_per_sample for stage in stages) for stages in divisions]
        new = Found(limit_s, min(slowest), max(slowest), divisions)
        self._found.append(new)
        return new

    def narrowed(self, at_most_s: float = math.inf) -> Iterator[Found | None]:
        """What is found, or not, on the way to the smallest bottleneck, which comes last.

        Args:
            at_most_s: larger bottlenecks are of no interest.
        """
        if not self.space.may_fit:
            return
        whole_s = min(self.space.rates.least_seconds(crew)[-1] for crew in self.space.crews)
        high_s, is_found, step = at_most_s, False, FIRST
        limit_s = min(high_s, self.low_s * step)
        while self.low_s <= limit_s:
            found = self.at(limit_s)
            yield found
            if self.is_spent:
                return
            if found:
                is_found, high_s = True, found.seconds_per_sample
            elif is_found and limit_s >= high_s * (1 - 2 * SECONDS):
                return
            if not is_found:
                if limit_s >= high_s:
                    return
                step **= 2
                # none at all once a single device keeps to it
                limit_s = min(high_s, self.low_s * step if self.low_s < 4 * whole_s else math.inf)
            elif high_s > self.low_s * PRECISION:
                limit_s = math.sqrt(self.low_s * high_s)
            else:
                limit_s = high_s * (1 - SECONDS)

    def smallest(self, at_most_s: float = math.inf) -> Found | None:
        """The divisions with the smallest bottleneck; None if it is larger than asked for."""
        return next((one for one in reversed([*self.narrowed(at_most_s)]) if one), None)
