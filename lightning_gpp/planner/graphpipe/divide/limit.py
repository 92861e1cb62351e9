"""A limit on the seconds per sample of every stage, and which stages keep to it."""

from __future__ import annotations

import math

from lightning_gpp.engine.play import ROUNDING
from lightning_gpp.planner.graphpipe.space.crew import Interval
from lightning_gpp.planner.graphpipe.space.rates import CrewRates


class Limit:
    """Most seconds per sample of a stage, and what was seen to take longer.

    Attributes:
        limit_s: most seconds per sample of a stage.
        next_limit_s: the least limit seen so far at which a stage would be possible that this one
            forbids; no limit in between has other ways.
        num_tried: stages that were looked at.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s * (1 + ROUNDING)
        self.next_limit_s = math.inf
        self.num_tried = 0

    def most_in_flight(self, interval: Interval, rates: CrewRates) -> float:
        """Micro-batches in flight that a stage has memory for; -1 where it is too slow."""
        self.num_tried += 1
        rate = rates(interval)
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
