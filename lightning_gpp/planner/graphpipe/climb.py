"""A local search: from a draft to a better one next to it, until there is none.

Behind it comes a search over shares by speed, a part of its own with a budget of its own, so that
no plan with equal shares is lost for it. At the end stages are merged where fewer do as well: a
climb takes every step that is shorter, if only by a thousandth, and so cuts stages more often than
is worth it; the judge is not that exact, and every stage has messages and an order to keep.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import itemgetter

from lightning_gpp.planner.data_parallel import shared_by_all
from lightning_gpp.planner.graphpipe.deals import deals, deals_in_turn
from lightning_gpp.planner.graphpipe.draft import Draft, draft_of
from lightning_gpp.planner.graphpipe.homes import Homes
from lightning_gpp.planner.graphpipe.judge import DraftJudge
from lightning_gpp.planner.graphpipe.moves import FAMILIES, Family, exchanged, joined
from lightning_gpp.planner.levelled import levelled, mixed_homes
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, evaluate_plan

BUDGET = 20_000
"""Looks of a part of a search: about half a second, whatever the model."""

FIRST_PATIENCE = 4
"""Steps of a family of moves that are played in vain at first, before the next family's turn; half
as many starts are climbed from, the best ones. So many deals of a number of replicas are played."""

NEAR = 1.1
"""A deal in turn, or a chain, whose step is so many times the best one may get ahead of it."""

LOOKS_PER_STEP = 32
"""Drafts of a family that are looked at for each step that may be played: few are promising."""


class Climber:
    """Improves a draft step by step.

    The families of moves take turns. Of the first drafts of each, those whose lower bound is below
    the step are played, the smallest bound first, until one is better.

    Args:
        draft: where it begins, with its stages in order.
        step_s: seconds of its step.
        judge: looks at drafts.
        homes: the groups of devices that stages may go to.
        families: its moves.

    Attributes:
        draft: where it is.
        step_s: seconds of its step.
    """

    def __init__(
        self,
        draft: Draft,
        step_s: float,
        judge: DraftJudge,
        homes: type[Homes],
        families: Sequence[Family] = FAMILIES,
    ) -> None:
        self.draft, self.step_s = draft, step_s
        self._judge, self._homes, self._families = judge, homes, families

    def run(self, patience: int) -> bool:
        """Climbs until no family has a better draft.

        Args:
            patience: steps that each family may play in vain.

        Returns:
            Whether more patience might find more.
        """
        in_vain, has_more, at, families = 0, False, 0, self._families
        while in_vain < len(families) and not self._judge.is_spent:
            family = families[at % len(families)]
            better, is_open = self._look(family, patience)
            if better:
                in_vain, has_more = 0, False
            else:
                in_vain += 1
                has_more |= is_open
                at += 1
        return has_more

    def _look(self, family: Family, patience: int) -> tuple[bool, bool]:
        """Whether a family has a better draft, which is taken; and whether it has others."""
        judge = self._judge
        neighbours = family(self.draft, self._homes(self.draft, judge.tables))
        some = islice(neighbours, LOOKS_PER_STEP * patience)
        for number, (_, draft) in enumerate(judge.promising(some, self.step_s)):
            if judge.is_spent:
                return False, False
            if number == patience:
                return False, True
            step_s = judge.step_s(draft, self.step_s)
            if step_s < self.step_s:
                self.draft, self.step_s = draft, step_s
                return True, False
        return False, next(neighbours, None) is not None


def climb_from(
    judge: DraftJudge,
    starts: Iterable[tuple[Draft, float]],
    deals: Iterable[tuple[float, Draft]] = (),
    homes: type[Homes] = Homes,
) -> None:
    """Climbs from the best starts, then from twice as many with twice the patience, and so on.

    Where stages may share devices, no move is better any more and budget is left, it also climbs
    from the drafts next to the best one.

    Args:
        judge: keeps what is found, and ends the search when its budget is spent.
        starts: drafts and the seconds of their steps.
        deals: lower bounds of the steps of further ones, ascending, and these; they are played
            when they may be among the best.
        homes: the groups of devices that stages may go to.
    """
    climbers = [Climber(draft, step_s, judge, homes) for draft, step_s in starts]
    unplayed, ended = deque(deals), list[Climber]()
    patience = FIRST_PATIENCE
    while (climbers or unplayed) and not judge.is_spent:
        count = patience // 2
        climbers.sort(key=lambda one: one.step_s)
        while unplayed and not judge.is_spent:
            least_s, draft = unplayed[0]
            if len(climbers) >= count and climbers[count - 1].step_s <= least_s:
                break
            unplayed.popleft()
            step_s = judge.step_s(draft, math.inf)
            if step_s < math.inf:
                insort(climbers, Climber(draft, step_s, judge, homes), key=lambda one: one.step_s)
        at: dict[Draft, Climber] = {}
        for climber in climbers[:count]:
            if climber.run(patience):
                at.setdefault(climber.draft, climber)
            else:
                ended.append(climber)
        climbers = [*at.values(), *climbers[count:]]
        patience *= 2
    if ended and homes.may_share:
        judge.limit(BUDGET // 4)
        _look_beyond(judge, min(ended, key=lambda one: one.step_s), homes)


def _look_beyond(judge: DraftJudge, best: Climber, homes: type[Homes]) -> None:
    """Climbs from drafts next to the best one: two moves may be better where neither is alone.

    Of every family those with the smallest lower bounds are climbed from, until one ends below the
    best draft; then it is the turn of those next to that one.

    Args:
        judge: keeps what is found, and ends the search when its budget is spent.
        best: where no move is better.
        homes: the groups of devices that stages may go to.
    """
    begun: set[Draft] = set()
    families = iter(FAMILIES)
    while not judge.is_spent and (family := next(families, None)) is not None:
        neighbours = family(best.draft, homes(best.draft, judge.tables))
        some = islice(neighbours, LOOKS_PER_STEP * FIRST_PATIENCE)
        for _, draft in judge.promising(some, math.inf)[: 2 * FIRST_PATIENCE]:
            if draft in begun or judge.is_spent:
                continue
            begun.add(draft)
            climber = Climber(draft, judge.step_s(draft, math.inf), judge, homes)
            if climber.step_s < math.inf:
                climber.run(FIRST_PATIENCE)
            if climber.step_s < best.step_s:
                best, families = climber, iter(FAMILIES)
                break


def best_deals(judge: DraftJudge, *, may_share: bool = True) -> list[tuple[float, Draft]]:
    """The most promising deals of every number of replicas, with lower bounds of their steps.

    Where stages may share devices, those on all devices and on fewer count apart, so that neither
    take the places of the others.

    Args:
        judge: looks at them.
        may_share: whether stages may have devices in common.
    """
    num_devices = judge.tables.request.num_devices
    found: dict[tuple[int, bool], list[tuple[float, Draft]]] = {}
    for draft in deals(judge.tables, may_share=may_share):
        uses_all = may_share and draft.num_devices == num_devices
        some = found.setdefault((draft.stages[0].num_replicas, uses_all), [])
        limit_s = some[-1][0] if len(some) == FIRST_PATIENCE else math.inf
        for one in judge.promising([draft], limit_s):
            insort(some, one, key=itemgetter(0))
            del some[FIRST_PATIENCE:]
    return sorted(chain.from_iterable(found.values()), key=itemgetter(0))


def climb_in_turn(judge: DraftJudge) -> None:
    """Climbs from runs dealt in turn that come near the best plan, a part of its own.

    Those that are played soonest come first: the lower bounds hardly tell them apart.

    Args:
        judge: keeps what is found, and has a best plan.
    """
    judge.allow(BUDGET // 4)
    near_s = NEAR * judge.best_s
    some = [draft for _, draft in judge.promising(deals_in_turn(judge.tables), near_s)]
    starts = []
    for draft in sorted(some, key=lambda one: one.num_actions):
        if judge.is_spent:
            break
        step_s = judge.step_s(draft, near_s)
        if step_s < math.inf:
            starts.append((draft, step_s))
    judge.allow(BUDGET // 2)
    climb_from(judge, starts)


def climb_from_others(judge: DraftJudge, others: DraftJudge, budget: int) -> None:
    """Climbs from the best plans of another judge if they come near, a part of its own.

    Another way up, and a short one, as these plans are good already. Stages of chains then wait for
    no more than they need.

    Args:
        judge: keeps what is found.
        others: a judge of chains, or of other stages that own their devices.
        budget: looks.
    """
    if others.best_s > NEAR * judge.best_s:
        return
    judge.allow(budget)
    drafts = others.drafts(others.found[:FIRST_PATIENCE])
    starts = [(draft, judge.step_s(draft, math.inf)) for draft, _ in drafts]
    climb_from(judge, [one for one in starts if one[1] < math.inf])


def climb_by_exchange(judge: DraftJudge, budget: int, homes: type[Homes] = Homes) -> None:
    """Climbs on from the best plan, where stages may exchange branches, too, a part of its own.

    There are many pairs of branches, and they seldom help before all else is done: among the other
    moves they would take the looks of these. Where stages own their devices these follow only if an
    exchange has helped.

    Args:
        judge: keeps what is found.
        budget: looks.
        homes: the groups of devices that stages may go to.
    """
    judge.allow(budget)
    for draft, step_s in judge.drafts([] if judge.best is None else [judge.best]):
        climber = Climber(draft, step_s, judge, homes, (exchanged,))
        if not homes.may_share:
            climber.run(FIRST_PATIENCE)
            if climber.draft is draft:
                return
        climber = Climber(climber.draft, climber.step_s, judge, homes, (exchanged, *FAMILIES))
        patience = FIRST_PATIENCE
        while not judge.is_spent and climber.run(patience):
            patience *= 2


def share_by_speed(
    judge: DraftJudge, found: Iterable[PlanEvaluation], homes: type[Homes] = Homes
) -> None:
    """Climbs from plans whose replicas on devices of different kinds take shares by speed.

    Args:
        judge: keeps what is found.
        found: plans with any shares, the best first. Of those with replicas on the same devices of
            different kinds the first one is taken.
        homes: the groups of devices that stages may go to.
    """
    request = judge.tables.request
    if len(request.cluster.kinds) == 1 or request.num_microbatches is not None:
        return  # a fixed number gives all stages one micro-batch size, which climbs would leave
    first = {frozenset(mixed_homes(one.plan, request)): one.plan for one in reversed([*found])}
    plans = [levelled(plan, request) for plan in first.values()]
    starts = [evaluate_plan(plan, request) for plan in plans if plan is not None]
    name = judge.name
    starts += [one for one in (shared_by_all(request, name, by_speed=True),) if one is not None]
    fitting = [one for one in starts if one.is_feasible]
    for one in fitting:
        judge.show(one)
    judge.allow(BUDGET)
    climb_from(judge, judge.drafts(fitting), homes=homes)


def merge_stages(judge: DraftJudge, at_most_s: float) -> None:
    """Merges stages of the best plan that have the same devices, and takes the fewest stages.

    Args:
        judge: knows the best plan, and takes note of others.
        at_most_s: the longest step that is as good.
    """
    judge.settle(at_most_s)
    draft = None if judge.best is None else draft_of(judge.best.plan, judge.tables)
    number = 0
    while draft is not None and number < len(draft.stages):
        found = next(_merged(draft, number, judge, at_most_s), None)
        if found is None:
            number += 1
        else:
            draft = found
    judge.settle(at_most_s)


def _merged(draft: Draft, first: int, judge: DraftJudge, at_most_s: float) -> Iterator[Draft]:
    """The drafts where one of the later stages is merged into a stage, with steps short enough."""
    for second in range(first + 1, len(draft.stages)):
        if draft.stages[first].devices == draft.stages[second].devices:
            for _, able in judge.promising(joined(draft, first, second), at_most_s):
                if judge.step_s(able, at_most_s) <= at_most_s:
                    yield able
