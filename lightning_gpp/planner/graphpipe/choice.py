"""The search over spaces: micro-batch sizes and replicas, each a question for the dynamic program.

Algorithm 1 of GraphPipe (arXiv 2406.17145, section 5.2) for every micro-batch size. It halves the
interval of limits; an answer says more than yes or no, so fewer questions do: divisions answer for
all limits down to what their slowest stage takes, and where there are none, there are none up to
the least limit at which one more stage would be possible.

Spaces with the least lower bounds of a step come first. The plan with the smallest bottleneck is
not always the fastest: one with fewer stages on its longest path warms up and drains sooner. So
all that is found on the way to the smallest bottleneck is judged, too, and at larger ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning_gpp.engine.play import ROUNDING
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.graphpipe.climb import BUDGET
from lightning_gpp.planner.graphpipe.draft import Draft, DraftStage
from lightning_gpp.planner.graphpipe.homes import given_out
from lightning_gpp.planner.graphpipe.judge import DraftJudge
from lightning_gpp.planner.graphpipe.partition import Cut, LimitedWays
from lightning_gpp.planner.graphpipe.space import Problem, Space, Trials

PRECISION = 1.015
"""By this factor the first limit is above the lower bound, and the first slower one above the
smallest bottleneck; and so near the ends of the interval of limits come before it is no longer
halved: a step in a hundred and fifty."""


def divided(
    problem: Problem,
    name: str,
    *,
    is_chain: bool = False,
    below_s: float = math.inf,
    must_find: bool = True,
) -> DraftJudge:
    """A judge that has seen the best divisions of a model in a line.

    Args:
        problem: what to divide.
        name: of the planner.
        is_chain: whether every stage waits for the one before it.
        below_s: steps that are not shorter are of no interest.
        must_find: whether all divisions are tried where none fits, for a memory that hardly any of
            them fits into.
    """
    judge = DraftJudge(problem.tables, name, BUDGET, is_chain=is_chain, below_s=below_s)
    choose(problem, judge)
    if judge.best_s == math.inf and must_find:
        judge.allow(math.inf)
        _look_everywhere(problem, judge)
    return judge


def choose(problem: Problem, judge: DraftJudge) -> None:
    """Shows a judge the best divisions of a problem, within its budget."""
    # Spaces of equal replicas first, which are searched in no time, then what promises most.
    for space in sorted(problem.spaces, key=lambda one: (len(one.rates) > 1, one.least.step_s)):
        if space.least.step_s < judge.best_s and not judge.is_spent:
            _look(space, judge)


def _look(space: Space, judge: DraftJudge) -> None:
    """Looks at divisions of one space that may beat the best step."""
    divisions, least = Divisions(space), space.least
    for found in divisions.narrowed(least.bottleneck_s(judge.best_s)):
        _show(found, space, judge)
        if judge.is_spent or least.bottleneck_s(judge.best_s) < divisions.low_s:
            break
    for limit_s in divisions.slower():
        if judge.is_spent or least.bottleneck_s(judge.best_s) < limit_s:
            break
        _show(divisions.at(limit_s), space, judge)
    if judge.best_s < math.inf:  # what nothing fits into takes no looks of what may
        judge.spend(divisions.num_tried)


def _look_everywhere(problem: Problem, judge: DraftJudge) -> None:
    """Looks for any division, however slow, and then for a fast one, of every size."""
    trials = Trials()
    for size in problem.request.microbatch_sizes:
        space = problem.space(size, trials=trials)
        divisions = Divisions(space)
        for found in (divisions.at(math.inf), divisions.smallest()):
            _show(found, space, judge)


def _show(found: Found | None, space: Space, judge: DraftJudge) -> None:
    """Plays the divisions that may be better than the best plan, the most promising first."""
    drafts = [
        draft
        for stages in (found.divisions if found else ())
        for draft in placed(stages, space.microbatch_size, judge.tables.request)
    ]
    for least_s, draft in judge.promising(drafts, judge.best_s):
        if least_s < judge.best_s:
            judge.step_s(draft, math.inf)


class Found(NamedTuple):
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
    divisions: tuple[tuple[Cut, ...], ...]


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
        self.low_s = max(space.lower_bound_s * (1 - ROUNDING), 1e-18)
        self.num_tried = 0
        self._whole_s = min(own.least_seconds[-1] for own in space.rates.values())
        self._found: list[Found] = []

    def at(self, limit_s: float) -> Found | None:
        """The divisions whose stages all keep to a limit per sample; None if there are none."""
        if limit_s < self.low_s:
            return None
        for known in self._found:
            if known.slowest_s <= limit_s <= known.limit_s:
                return known
        search = LimitedWays(self.space, limit_s)
        ways = search.ways()
        self.num_tried += search.num_tried
        if not ways:
            self.low_s = max(limit_s, search.next_limit_s * (1 - ROUNDING))
            return None
        divisions = tuple(tuple(way.cuts()) for way in ways)
        slowest = [max(stage.seconds_per_sample for stage in stages) for stages in divisions]
        new = Found(limit_s, min(slowest), max(slowest), divisions)
        self._found.append(new)
        return new

    def narrowed(self, at_most_s: float = math.inf) -> Iterator[Found | None]:
        """What is found, or not, on the way to the smallest bottleneck, which comes last.

        Args:
            at_most_s: larger bottlenecks are of no interest.
        """
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


def placed(stages: Sequence[Cut], microbatch_size: float, request: PlanRequest) -> list[Draft]:
    """Stages with their devices given out in different ways.

    In the order of the stages, so that those of a branch are neighbours in the cluster and what
    they exchange stays in a host; and with the first choice for the stages with most replicas, so
    that their groups do not lie across hosts.

    Args:
        stages: the stages in the order of their places.
        microbatch_size: samples of the smallest micro-batch, of which replicas may share one.
        request: the question.
    """
    parts = max(-(-stage.crew.num_replicas // stage.crew.multiple) for stage in stages)
    count = round(request.minibatch_size / microbatch_size) * parts
    by_size = sorted(range(len(stages)), key=lambda number: -stages[number].crew.num_replicas)
    kinds = [device.kind for device in request.cluster.devices]
    named = request.cluster.kinds
    wanted = [(named[one.crew.kind], one.crew.num_replicas) for one in stages]
    ways = given_out(wanted, kinds), given_out(wanted, kinds, by_size)
    units = [(1 << stop) - (1 << start) for (start, stop), *_ in stages]
    return [
        Draft(
            tuple(
                DraftStage(own, home, parts * one.crew.multiple, one.recompute)
                for own, home, one in zip(units, devices, stages)
            ),
            count,
        ).reduced()
        for devices in dict.fromkeys(way for way in ways if way is not None)
    ]
