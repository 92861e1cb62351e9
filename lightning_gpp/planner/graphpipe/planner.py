"""The planners ``graphpipe``, ``graphpipe_exclusive`` and ``sequential``.

``graphpipe_exclusive`` searches the published space, in which stages own their devices: the best
divisions, and a climb among such plans. ``graphpipe`` goes beyond the paper: a climb among plans
whose stages share devices, from the best of the former and those of other planners.

``sequential`` is the ablation of the paper (section 7.4): the same cost model, micro-batch sizes,
replicas and memory limits, but the operators stand in one line and every stage waits for the one
before it, so that branches never run in parallel. It is the dynamic program alone, without a climb.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from lightning_gpp.engine.play import ROUNDING
from lightning_gpp.planner.balanced import balanced, balanced_microbatches
from lightning_gpp.planner.base import DoesNotFitError, PlanRequest, does_not_fit
from lightning_gpp.planner.data_parallel import shared_by_all
from lightning_gpp.planner.graphpipe.choice import divided
from lightning_gpp.planner.graphpipe.climb import (
    BUDGET,
    best_deals,
    climb_from,
    merge_stages,
    share_by_speed,
)
from lightning_gpp.planner.graphpipe.draft import UnitTables
from lightning_gpp.planner.graphpipe.homes import OwnHomes
from lightning_gpp.planner.graphpipe.judge import FEW_DEVICES, DraftJudge, SearchResult
from lightning_gpp.planner.graphpipe.space import Problem
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, evaluate_plan

AS_GOOD = 1.005
"""A step so many times as long is as good if its plan has fewer stages: the judge and the simulator
agree on most plans to less than one per cent."""


def search_plans(request: PlanRequest, budget: int = 2 * BUDGET) -> SearchResult:
    """The plan with the shortest predicted step, whose stages may share devices.

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
    return _result(judge)


def search_exclusive(request: PlanRequest) -> SearchResult:
    """The plan with the shortest predicted step whose stages own their devices.

    Stages form a graph, have replicas in powers of two (or the whole model has one on every
    device), and may leave devices unused.

    Raises:
        DoesNotFitError: no plan fits into the devices' memory.
    """
    judge = exclusive_plans(Problem(UnitTables(request)), request.named("graphpipe_exclusive"))
    share_by_speed(judge, judge.found, OwnHomes)
    return _result(judge)


def search_chains(request: PlanRequest) -> SearchResult:
    """The chain of stages with the shortest predicted step.

    Raises:
        DoesNotFitError: no plan fits into the devices' memory.
    """
    problem = Problem(UnitTables(request))
    return _result(divided(problem, request.named("sequential"), is_chain=True))


def exclusive_plans(problem: Problem, name: str, *, must_find: bool = True) -> DraftJudge:
    """A judge that has seen what the search finds for stages that own their devices.

    The model is divided as a line of units, as ``sequential`` does, but the stages wait only for
    what they need; from the best of these plans, from the whole model on every device and from
    deals it climbs.

    Args:
        problem: the question.
        name: of the planner.
        must_find: as of :func:`~lightning_gpp.planner.graphpipe.choice.divided`.
    """
    judge, request = divided(problem, name, must_find=must_find), problem.request
    starts: dict[tuple[int, ...], PlanEvaluation] = {}
    shared = shared_by_all(request, name)
    others = [] if shared is None else [shared]
    for plan in (*judge.found, *_as_if_equal(request, name), *others):
        judge.show(plan)
        starts.setdefault(tuple(stage.num_replicas for stage in plan.plan.stages), plan)
    judge.allow(BUDGET)
    deals = best_deals(judge, may_share=False)
    climb_from(judge, judge.drafts(starts.values()), deals, OwnHomes)
    return judge


def _as_if_equal(request: PlanRequest, name: str) -> Iterator[PlanEvaluation]:
    """The best plan for equal devices on the unequal ones.

    All as slow as the slowest kind, with the smallest memory. The search gives every stage devices
    of one kind; where kinds differ little, stages whose replicas are of several kinds may be
    faster, up to the whole model on all devices.
    """
    cluster = request.cluster
    if len(cluster.kinds) == 1:
        return
    slowest = request.slowest_kind(request.microbatch_sizes[len(request.microbatch_sizes) // 2])
    known = [d.memory_bytes for d in cluster.devices if d.memory_bytes is not None]
    devices = tuple(
        replace(device, kind=slowest, memory_bytes=min(known, default=None))
        for device in cluster.devices
    )
    equal = replace(request, cluster=replace(cluster, devices=devices))
    best = exclusive_plans(Problem(UnitTables(equal)), name).best
    found = None if best is None else evaluate_plan(best.plan, request)
    if found is not None and found.is_feasible:
        yield found


def climbed(request: PlanRequest, budget: int) -> tuple[DraftJudge, float]:
    """A judge that has seen what the climbs find, and the shortest step of another planner.

    Args:
        request: the question.
        budget: looks of the climb of stages that share devices. The search with fewer is the
            beginning of the search with more, so more never end in a worse plan.
    """
    problem = Problem(UnitTables(request))
    judge = exclusive_plans(problem, request.named("graphpipe"))
    exclusive = judge.found
    judge.allow(budget)
    others = [*([judge.best] if judge.best else []), *_other_planners(problem, judge)]
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
        own = exclusive_plans(Problem(UnitTables(fewer)), judge.name, must_find=False)
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
    name = request.named("graphpipe")
    judge = DraftJudge(UnitTables(request), name, BUDGET, least_devices=num_devices)
    _climb(judge, starts)
    return judge.best


def _climb(judge: DraftJudge, starts: Iterable[PlanEvaluation]) -> None:
    """Climbs from plans that fit into memory, and from deals."""
    fitting = [one for one in starts if one.is_feasible]
    for one in fitting:
        judge.show(one)
    climb_from(judge, judge.drafts(fitting), best_deals(judge))


def _other_planners(problem: Problem, judge: DraftJudge) -> Iterator[PlanEvaluation]:
    """The plans of other planners, where they may have a shorter step than the best."""
    request, name, best_s = problem.request, judge.name, judge.best_s
    if (shared := shared_by_all(request, name)) is not None:
        yield shared
    if (chain := divided(problem, name, is_chain=True, below_s=best_s).best) is not None:
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


def _result(judge: DraftJudge) -> SearchResult:
    """The best plan that a judge has seen.

    Raises:
        DoesNotFitError: no plan fits into the devices' memory.
    """
    best, request = judge.best, judge.tables.request
    if best is None:
        raise DoesNotFitError(does_not_fit(request, "no division of the model into stages fits"))
    notes: tuple[str, ...] = ()
    if spare := request.num_devices - len(best.devices):
        idle = "1 device stays" if spare == 1 else f"{spare} devices stay"
        notes = (f"{idle} idle: plans with more devices were not faster",)
    return SearchResult(best.plan, notes, judge.ranked())
