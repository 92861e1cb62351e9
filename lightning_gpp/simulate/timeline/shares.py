"""The shares of a step's time: compute, communication, waiting, and so on.

Definitions, for one rank and a step of ``step_s`` seconds (from the first thing that any rank does
for the step to the last; the same for all ranks):

- *forward*, *backward*: seconds in which compute actions of the program run. The user's own step
  (what it does before and after the pipelined forward) counts as forward.
- *communication*: seconds spent on handing messages over, on receiving messages that have been
  sent, and on summing gradients of shared parameters. Transfers that go on while something else
  runs are hidden, and not counted.
- *wait*: seconds in which the rank stands still because another one has not sent yet.
- *other*: reading data and cutting it, joining results, the optimizer's step.
- *idle*: the rest: before the rank's first action and after its last, and Python in between.
- *bubble*: seconds in which no compute action runs, that is ``step_s - forward - backward``.

Of all ranks together, a share is the mean of theirs: the part of the step's rank-seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_gpp.simulate.timeline.span import Category, Span
from lightning_gpp.simulate.timeline.timeline import Timeline

IDLE = "idle"


@dataclass(frozen=True, slots=True)
class RankShares:
    """How one rank spent a step.

    Attributes:
        step_s: seconds of the step, the same for all ranks.
        seconds: category -> seconds of the rank in it; idle among them, they add up to the step.
    """

    step_s: float
    seconds: Mapping[str, float]

    @property
    def bubble_s(self) -> float:
        """Seconds without a compute action."""
        compute = (category.value for category in Category if category.is_compute)
        return self.step_s - sum(self.seconds[name] for name in compute)

    @property
    def bubble_share(self) -> float:
        """Part of the step without a compute action, from 0 to 1."""
        return self.bubble_s / self.step_s if self.step_s else 0.0

    def by_category(self) -> dict[str, float]:
        """Category -> its part of the step; they add up to 1."""
        return {name: s / self.step_s if self.step_s else 0.0 for name, s in self.seconds.items()}


@dataclass(frozen=True, slots=True)
class Shares:
    """How every rank spent a step."""

    ranks: tuple[RankShares, ...]

    @property
    def bubble_share(self) -> float:
        """Part of all rank-seconds of the step in which no compute action runs."""
        return sum(rank.bubble_share for rank in self.ranks) / len(self.ranks)

    def metrics(self) -> dict[str, float]:
        """The numbers by the names under which they are logged."""
        named = {
            "timeline/step_s": self.ranks[0].step_s,
            "timeline/bubble_share": self.bubble_share,
        }
        for number, rank in enumerate(self.ranks):
            named[f"timeline/rank{number}/bubble_share"] = rank.bubble_share
            for category, share in rank.by_category().items():
                named[f"timeline/rank{number}/{category}_share"] = share
        return named


def shares(timeline: Timeline) -> Shares:
    """The share of each category in every rank's time."""
    return Shares(tuple(_of_rank(timeline, rank) for rank in range(timeline.num_ranks)))


def _of_rank(timeline: Timeline, rank: int) -> RankShares:
    seconds = {category.value: 0.0 for category in Category}
    for span in timeline.of_rank(rank):
        seconds[span.kind.category.value] += span.duration_s
    idle_s = max(0.0, timeline.step_s - sum(seconds.values()))
    return RankShares(timeline.step_s, seconds | {IDLE: idle_s})


def path_shares(timeline: Timeline) -> dict[str, float]:
    """Category -> the part of the step that the critical path spends in it; they add up to 1.

    Transfers count as communication. What is left is *idle*: nothing that is recorded held the
    step up.
    """
    seconds = {category.value: 0.0 for category in Category}
    for segment in timeline.path_segments:
        item = segment.item
        category = item.kind.category if isinstance(item, Span) else Category.COMMUNICATION
        seconds[category.value] += segment.duration_s
    idle_s = max(0.0, timeline.step_s - sum(seconds.values()))
    return RankShares(timeline.step_s, seconds | {IDLE: idle_s}).by_category()
