"""The planner ``graphpipe``: plans whose stages may share devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from lightning_gpp.engine.play import ROUNDING
from lightning_gpp.planner.balanced import balanced, balanced_microbatches
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.data_parallel import shared_by_all
from lightning_gpp.planner.graphpipe.choose.choice import divided
from lightning_gpp.planner.graphpipe.choose.result import SearchResult
from lightning_gpp.planner.graphpipe.place.by_speed import share_by_speed
from lightning_gpp.planner.graphpipe.place.climb import BUDGET, climb_from
from lightning_gpp.planner.graphpipe.place.deals import best_deals
from lightning_gpp.planner.graphpipe.place.fewer import merge_stages
from lightning_gpp.planner.graphpipe.place.judged import FEW_DEVICES, DraftJudge
from lightning_gpp.planner.graphpipe.place.own_homes import OwnHomes
from lightning_gpp.planner.graphpipe.place.unit_tables import UnitTables
from lightning_gpp.planner.graphpipe.planner import exclusive_plans, result_of, search_exclusive
from lightning_gpp.planner.graphpipe.problem import Problem
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, evaluate_plan

NAME = "graphpipe"

AS_GOOD = 1.005
"""A step so many times as long is as good if its plan has fewer stages: the judge and the simulator
agree on most plans to less than one per cent."""


def graphpipe(request: PlanRequest) -> Plan:
    """The plan with the shortest predicted step.

    Raises:
        DoesNotFitError: no plan fits into the devices' memory.
    """
    return search_plans(request).best


def search_plans(request: PlanRequest, budget: int = 2 * BUDGET) -> SearchResult:
    """The search of :func:`graphpipe`, with what it looked at.

    Where the pipeline does not drain stages own their devices: every stage more on the way to the
    loss is one update more between a forward and its backward, which a few per cent of the step are
    not worth.

    Args:
        request: the question.
        budget: looks of the climb of stages that share devices, by default twice those of another
            part, as there is more to choose.

    Raises:
        DoesNotFitError: no plan fits into the devices' memory.
    """
    if not request.order.flushes:
        return search_exclusive(request)
    judge, others_s = climbed(request, budget)
    judge.allow(BUDGET // 4)
    merge_stages(judge, min(AS_GOOD * judge.best_s, others_s))
    return result_of(judge)


def climbed(request: PlanRequest, budget: int) -> tuple[DraftJudge, float]:
    """A judge that has seen what the climbs find, and the shortest step of another planner.

    Args:
        request: the question.
        budget: looks of the climb of stages that share devices. The search with fewer is the
            beginning of the search with more, so more never end in a worse plan.
    """
    name = f"{NAME} (estimated)" if request.is_estimated else NAME
    problem = Problem(UnitTables(request))
    judge = exclusive_plans(problem, name)
    exclusive = judge.found
    judge.allow(budget)
    others = [*([judge.best] if judge.best else []), *_other_planners(problem, name, judge.best_s)]
    _climb(judge, others)
    share_by_speed(judge, exclusive, OwnHomes)
    share_by_speed(judge, judge.found)
    if exclusive and request.num_devices > FEW_DEVICES:
        climb_on_fewer(judge, exclusive[0])
    return judge, min((one.step_s for one in others if one.is_feasible), default=math.inf)


def climb_on_fewer(judge: DraftJudge, exclusive: PlanEvaluation) -> None:
    """Climbs on a half, a quarter, … of many devices, as long as that is as good.

    On many devices few drafts can be played, and a climb hardly finds the way to fewer, as it moves
    one stage at a time. Where stages that own their devices do as well on half of them, others may,
    too. These are searches of their own, with their own budgets, so that no plan is lost for them.

    Args:
        judge: takes note of the best plans.
        exclusive: the best plan on all devices whose stages own theirs.
    """
    request = judge.tables.request
    work_s = sum(device.busy_s for device in exclusive.devices)
    count, best_s = request.num_devices // 2, exclusive.step_s
    while count and work_s < count * best_s:
        fewer = replace(request, cluster=request.cluster.first(count))
        own = exclusive_plans(Problem(UnitTables(fewer), must_find=False), judge.name)
        if own.best is None or own.best_s > AS_GOOD * best_s:
            break
        count, best_s = count // 2, min(best_s, own.best_s)
        own.allow(2 * BUDGET)
        climb_from(own, own.drafts([own.best]))
        judge.show(evaluate_plan(own.best.plan, request))


def search_on_all(
    request: PlanRequest, starts: Iterable[PlanEvaluation], num_devices: int
) -> PlanEvaluation | None:
    """The best plan on so many devices at least, from some plans and from deals alone.

    Args:
        request: the question.
        starts: plans on so many devices.
        num_devices: the least number.

    Returns:
        None where none fits into memory.
    """
    name = f"{NAME} (estimated)" if request.is_estimated else NAME
    judge = DraftJudge(UnitTables(request), name, BUDGET, least_devices=num_devices)
    _climb(judge, starts)
    return judge.best


def _climb(judge: DraftJudge, starts: Iterable[PlanEvaluation]) -> None:
    """Climbs from plans that fit into memory, and from deals."""
    fitting = [one for one in starts if one.is_feasible]
    for one in fitting:
        judge.show(one)
    climb_from(judge, judge.drafts(fitting), best_deals(judge))


def _other_planners(problem: Problem, name: str, best_s: float) -> Iterator[PlanEvaluation]:
    """The plans of other planners that fit, where they may have a shorter step than the best."""
    request = problem.request
    shared = shared_by_all(request, name)
    if shared is not None:
        yield shared
    chain = divided(problem, name, is_chain=True, below_s=best_s).best
    if chain is not None:
        yield chain
    if least_balanced_s(problem.tables) * (1 - ROUNDING) < best_s:
        try:
            plan = balanced(request)
        except ValueError:  # it has none for so many devices
            return
        yield evaluate_plan(replace(plan, planner=name), request)


def least_balanced_s(tables: UnitTables) -> float:
    """What ``balanced`` takes at least: no replicas, so one device has the longest unit."""
    request = tables.request
    count = balanced_microbatches(request)
    kinds = [tables.each_s(request.minibatch_size / count, kind) for kind in request.cluster.kinds]
    fastest: list[float] = [min(seconds) for seconds in zip(*kinds)]
    return count * max(max(fastest), sum(fastest) / request.num_devices)
