"""A search over shares by speed, behind one in which all replicas take equal shares.

It is a part of its own, with a budget of its own, so that no plan with equal shares is lost for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_gpp.planner.data_parallel import shared_by_all
from lightning_gpp.planner.graphpipe.place.climb import BUDGET, climb_from
from lightning_gpp.planner.graphpipe.place.homes import Homes
from lightning_gpp.planner.graphpipe.place.judged import DraftJudge
from lightning_gpp.planner.levelled import levelled, mixed_homes
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, evaluate_plan


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
