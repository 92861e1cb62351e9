"""The planner ``graphpipe``, and those that are the same search with a restriction."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.data_parallel import shared_by_all
from lightning_gpp.planner.graphpipe.by_speed import share_by_speed
from lightning_gpp.planner.graphpipe.climb import BUDGET, climb_from
from lightning_gpp.planner.graphpipe.deals import best_deals
from lightning_gpp.planner.graphpipe.exclusive import balanced_plan, chains, graphs
from lightning_gpp.planner.graphpipe.fewer import merge_stages
from lightning_gpp.planner.graphpipe.infeasible import infeasible_error
from lightning_gpp.planner.graphpipe.judged import FEW_DEVICES, DraftJudge
from lightning_gpp.planner.graphpipe.own_homes import OwnHomes
from lightning_gpp.planner.graphpipe.result import SearchResult
from lightning_gpp.planner.graphpipe.unit_tables import UnitTables
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, evaluate_plan
from lightning_gpp.planner.units.units import num_separable

NAME = "graphpipe"

AS_GOOD = 1.005
"""A step so many times as long is as good if its plan has fewer stages: the judge and the simulator
agree on most plans to less than one per cent."""


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
    tables, name = UnitTables(request), request.named(NAME)
    judge, others = exclusive_plans(tables, name)
    exclusive = judge.found
    judge.allow(budget)
    _climb(judge, [*exclusive[:1], *others])
    share_by_speed(judge, exclusive, OwnHomes)
    share_by_speed(judge, judge.found)
    if exclusive and request.num_devices > FEW_DEVICES:
        climb_on_fewer(judge, exclusive[0])
    return judge, min((one.step_s for one in others if one.is_feasible), default=math.inf)


def exclusive_plans(tables: UnitTables, name: str) -> tuple[DraftJudge, list[PlanEvaluation]]:
    """A judge that has seen plans whose stages own their devices, and the plans it began with.

    Args:
        tables: of the units.
        name: of the planner.
    """
    others = [chains(tables, name).best, balanced_plan(balanced_request(tables.request), name)]
    found = [one for one in (*others, shared_by_all(tables.request, name)) if one is not None]
    return graphs(tables, name, found), found


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
        own = graphs(UnitTables(fewer), judge.name, ())
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
    judge = DraftJudge(UnitTables(request), request.named(NAME), BUDGET, least_devices=num_devices)
    _climb(judge, starts)
    return judge.best


def _climb(judge: DraftJudge, starts: Iterable[PlanEvaluation]) -> None:
    """Climbs from plans that fit into memory, and from deals."""
    fitting = [one for one in starts if one.is_feasible]
    for one in fitting:
        judge.show(one)
    climb_from(judge, judge.drafts(fitting), best_deals(judge))


def search_exclusive(request: PlanRequest) -> SearchResult:
    """The search of ``graphpipe_exclusive``: stages own their devices, as published.

    Raises:
        DoesNotFitError: no plan fits into the devices' memory.
    """
    judge, _ = exclusive_plans(UnitTables(request), request.named("graphpipe_exclusive"))
    share_by_speed(judge, judge.found, OwnHomes)
    return result_of(judge)


def search_chains(request: PlanRequest) -> SearchResult:
    """The search of ``sequential``: every stage waits for the one before it.

    The ablation of GraphPipe (arXiv 2406.17145, section 7.4): the same costs, sizes of
    micro-batches, replicas and limits of memory, but branches never run in parallel.

    Raises:
        DoesNotFitError: no plan fits into the devices' memory.
    """
    return result_of(chains(UnitTables(request), request.named("sequential")))


def balanced(request: PlanRequest) -> Plan:
    """One stage of about equal work per device, without replicas; all devices are used.

    Raises:
        ValueError: there are more devices than units that can be separated.
    """
    found = balanced_plan(balanced_request(request), request.named("balanced"))
    if found is not None:
        return found.plan
    most, together = num_separable(request.graph), len(request.graph)
    because = f" ({together - most} more must stay with others: common state)"
    raise ValueError(
        f"{request.num_devices} devices need as many stages, but the model has only {most} "
        f"operators that can be separated{because if together > most else ''}; use at most {most} "
        "devices, or make the model's leaf modules smaller"
    )


def balanced_request(request: PlanRequest) -> PlanRequest:
    """The question with as many micro-batches as asked for, or enough to fill the pipeline.

    That is twice the number of devices, where the mini-batch has them.
    """
    count = request.num_microbatches or min(2 * request.num_devices, request.minibatch_size)
    return replace(request, num_microbatches=count)


def result_of(judge: DraftJudge) -> SearchResult:
    """The best plan that a judge has seen.

    Raises:
        DoesNotFitError: no plan fits into the devices' memory.
    """
    best, request = judge.best, judge.tables.request
    if best is None:
        raise infeasible_error(request)
    notes: tuple[str, ...] = ()
    if spare := request.num_devices - len(best.devices):
        idle = "1 device stays" if spare == 1 else f"{spare} devices stay"
        notes = (f"{idle} idle: plans with more devices were not faster",)
    return SearchResult(best.plan, notes, rank=judge.ranked)
