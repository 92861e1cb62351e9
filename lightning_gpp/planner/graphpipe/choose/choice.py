"""The search over spaces: micro-batch sizes and replicas, each a question for the dynamic program.

Algorithm 1 of GraphPipe (arXiv 2406.17145, section 5.2) for every micro-batch size. Spaces with the
least lower bounds of a step come first. The plan with the smallest bottleneck is not always the
fastest: one with fewer stages on its longest path warms up and drains sooner. So all that is found
on the way to the smallest bottleneck is judged, too, and what is found at larger ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from lightning_gpp.planner.graphpipe.choose.found_stage import placed
from lightning_gpp.planner.graphpipe.choose.least import LeastStep, least_step
from lightning_gpp.planner.graphpipe.choose.limits import Divisions, Found
from lightning_gpp.planner.graphpipe.place.climb import BUDGET
from lightning_gpp.planner.graphpipe.place.judged import DraftJudge
from lightning_gpp.planner.graphpipe.problem import Problem
from lightning_gpp.planner.graphpipe.space.space import Space


def divided(
    problem: Problem, name: str, *, is_chain: bool = False, below_s: float = math.inf
) -> DraftJudge:
    """A judge that has seen the best divisions of a model in a line.

    Where none fits all divisions are tried, however long that takes, for a memory that hardly any
    of them fits into.

    Args:
        problem: what to divide.
        name: of the planner.
        is_chain: whether every stage waits for the one before it.
        below_s: steps that are not shorter are of no interest.
    """
    judge = DraftJudge(problem.tables, name, BUDGET, is_chain=is_chain, below_s=below_s)
    choose(problem, judge)
    if judge.best_s == math.inf and problem.must_find:
        judge.allow(math.inf)
        _look_everywhere(replace(problem, tries_all=True), judge)
    return judge


def choose(problem: Problem, judge: DraftJudge) -> None:
    """Shows a judge the best divisions of a problem, within its budget."""
    looks = [
        (least_step(one, space), space)
        for one in problem.with_sums_both_ways
        for space in spaces(one)
    ]
    for least, space in sorted(looks, key=_promise):
        if least.step_s < judge.best_s and not judge.is_spent:
            _look(least, space, judge)


def _look(least: LeastStep, space: Space, judge: DraftJudge) -> None:
    """Looks at divisions of one space that may beat the best step."""
    divisions = Divisions(space)
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
    for size in problem.request.microbatch_sizes:
        space = problem.space(size)
        divisions = Divisions(space)
        for found in (divisions.at(math.inf), divisions.smallest()):
            _show(found, space, judge)


def _show(found: Found | None, space: Space, judge: DraftJudge) -> None:
    """Plays the divisions that may be better than the best plan, the most promising first."""
    size, request = space.rates.microbatch_size, judge.tables.request
    drafts = [
        draft
        for stages in (found.divisions if found else ())
        for draft in placed(stages, size, request)
    ]
    for least_s, draft in judge.promising(drafts, judge.best_s):
        if least_s < judge.best_s:
            judge.step_s(draft, math.inf)


def spaces(problem: Problem) -> Iterator[Space]:
    """The spaces of a problem: stages all have as many replicas, or any, or replicas take turns."""
    for size in problem.request.microbatch_sizes:
        yield problem.space(size)
        for count in problem.request.replica_counts(max(problem.available)):
            if count == 1 or not size % count:
                yield problem.space(size, num_replicas=count)
        if problem.can_take_turns:
            yield problem.space(size, take_turns=True)


def _promise(look: tuple[LeastStep, Space]) -> tuple[bool, float]:
    """Spaces of equal replicas first, which are searched in no time, then what promises most."""
    least, space = look
    return len(space.crews) > 1, least.step_s
