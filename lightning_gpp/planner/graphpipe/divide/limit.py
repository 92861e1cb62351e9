"""A limit on the seconds per sample of every stage, and which stages keep to it."""

from __future__ import annotations

import math

from lightning_gpp.planner.graphpipe.space.crew import Crew
from lightning_gpp.planner.graphpipe.space.layout import Interval
from lightning_gpp.planner.graphpipe.space.rates import CrewRates
from lightning_gpp.planner.graphpipe.space.space import Space
from lightning_gpp.planner.graphpipe.tolerances import LIMIT


class OutOfBudgetError(Exception):
    """A search for one limit tried as many stages as it may."""


class Limit:
    """Most seconds per sample of a stage, and what was seen to take longer.

    Attributes:
        limit_s: most seconds per sample of a stage.
        next_limit_s: the least limit seen so far at which a stage would be possible that this one
            forbids; no limit in between has other ways.
        num_tried: stages that were looked at.
    """

    def __init__(self, space: Space, limit_s: float, most_tried: float = math.inf) -> None:
        self._space = space
        self.limit_s = limit_s * (1 + LIMIT)
        self.next_limit_s = math.inf
        self.num_tried = 0
        self._most_tried = most_tried

    def fits(self, intervals: tuple[Interval, ...], crew: Crew, units: int) -> bool:
        """Whether a stage is fast enough and finds enough memory."""
        most = self.most_in_flight(intervals, self._space.rates.of(crew))
        return self._space.in_flight(units, crew) <= most

    def most_in_flight(self, intervals: tuple[Interval, ...], rates: CrewRates) -> float:
        """Micro-batches in flight that a stage has memory for; -1 where it is too slow.

        Raises:
            OutOfBudgetError: too many stages have been asked for.
        """
        self.num_tried += 1
        if self.num_tried > self._most_tried:
            raise OutOfBudgetError
        rate = rates(intervals)
        most = rate.most_in_flight
        if rate.seconds_per_sample > self.limit_s:
            self.too_slow(rate.seconds_per_sample)
            most = -1.0
        if rate.recomputed_seconds_per_sample <= self.limit_s:
            return max(most, rate.recomputed_most_in_flight)
        self.too_slow(rate.recomputed_seconds_per_sample)
        return most

    def too_slow(self, seconds_per_sample: float) -> None:
        """Notes what a stage takes that does not keep to the limit."""
        if seconds_per_sample < self.next_limit_s:
            self.next_limit_s = seconds_per_sample
