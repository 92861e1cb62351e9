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

from lightning_gpp.engine.play import ROUNDING
from lightning_gpp.planner.graphpipe.choose.found_stage import FoundStage, found_stages
from lightning_gpp.planner.graphpipe.divide.partition import LimitedWays
from lightning_gpp.planner.graphpipe.space.space import Space

PRECISION = 1.015
"""By this factor the first limit is above the lower bound, and the first slower one above the
smallest bottleneck; and so near the ends of the interval of limits come before it is no longer
halved: a step in a hundred and fifty."""


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

    Attributes:
        low_s: no division keeps to a limit below this one.
        num_tried: stages that the searches tried.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.low_s = max(space.load.lower_bound_s * (1 - ROUNDING), 1e-18)
        self.num_tried = 0
        self._whole_s = min(space.rates.of(crew).least_seconds[-1] for crew in space.crews)
        self._found: list[Found] = []

    def at(self, limit_s: float) -> Found | None:
        """The divisions whose stages all keep to a limit per sample; None if there are none."""
        if limit_s < self.low_s or not self.space.may_fit:
            return None
        for known in self._found:
            if known.slowest_s <= limit_s <= known.limit_s:
                return known
        partition = LimitedWays(self.space, limit_s)
        ways = partition.ways()
        self.num_tried += partition.limit.num_tried
        if not ways:
            self.low_s = max(limit_s, partition.limit.next_limit_s * (1 - ROUNDING))
            return None
        divisions = tuple(found_stages(way, self.space, limit_s) for way in ways)
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
        high_s, is_found, step = at_most_s, False, PRECISION
        limit_s = min(high_s, self.low_s * step)
        while self.low_s <= limit_s:
            found = self.at(limit_s)
            yield found
            if found:
                is_found, high_s = True, found.seconds_per_sample
            elif is_found and limit_s >= high_s * (1 - 8 * ROUNDING):
                return
            if not is_found:
                if limit_s >= high_s:
                    return
                step **= 2
                may_be = self.low_s < 4 * self._whole_s  # otherwise a single device keeps to it
                limit_s = min(high_s, self.low_s * step if may_be else math.inf)
            elif high_s > self.low_s * PRECISION:
                limit_s = math.sqrt(self.low_s * high_s)
            else:
                limit_s = high_s * (1 - 4 * ROUNDING)

    def slower(self) -> Iterator[float]:
        """Limits above the smallest bottleneck that was found, twice as far from it each time."""
        least_s = min((one.seconds_per_sample for one in self._found), default=math.inf)
        step = PRECISION
        while least_s * step < self._whole_s:
            yield least_s * step
            step **= 2

    def smallest(self, at_most_s: float = math.inf) -> Found | None:
        """The divisions with the smallest bottleneck; None if it is larger than asked for."""
        return next((one for one in reversed([*self.narrowed(at_most_s)]) if one), None)
