"""The planner ``graphpipe_exclusive``: the published space, where stages own their devices."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.data_parallel import shared_by_all
from lightning_gpp.planner.graphpipe.choose.choice import divided
from lightning_gpp.planner.graphpipe.choose.infeasible import infeasible_error
from lightning_gpp.planner.graphpipe.choose.result import SearchResult
from lightning_gpp.planner.graphpipe.place.by_speed import share_by_speed
from lightning_gpp.planner.graphpipe.place.climb import BUDGET, climb_from
from lightning_gpp.planner.graphpipe.place.deals import best_deals
from lightning_gpp.planner.graphpipe.place.judged import DraftJudge
from lightning_gpp.planner.graphpipe.place.own_homes import OwnHomes
from lightning_gpp.planner.graphpipe.place.unit_tables import UnitTables
from lightning_gpp.planner.graphpipe.problem import Problem
from lightning_gpp.planner.graphpipe.space.equal_devices import as_if_equal
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, evaluate_plan

NAME = "graphpipe_exclusive"


def graphpipe_exclusive(request: PlanRequest) -> Plan:
    """The plan with the shortest predicted step.

    Stages form a graph, own their devices, have replicas in powers of two (or the whole model has
    one on every device), and may leave devices unused.

    Raises:
        DoesNotFitError: no plan fits into the devices' memory.
    """
    return search_exclusive(request).best


def search_exclusive(request: PlanRequest) -> SearchResult:
    """The search of :func:`graphpipe_exclusive`, with what it looked at.

    Raises:
        DoesNotFitError: no plan fits into the devices' memory.
    """
    name = f"{NAME} (estimated)" if request.is_estimated else NAME
    judge = exclusive_plans(Problem(UnitTables(request)), name)
    share_by_speed(judge, judge.found, OwnHomes)
    return result_of(judge)


def exclusive_plans(problem: Problem, name: str) -> DraftJudge:
    """A judge that has seen what the search finds.

    The model is divided as a line of units, as ``sequential`` does, but the stages wait only for
    what they need; from the best of these plans, from the whole model on every device and from
    deals it climbs.

    Args:
        problem: the question.
        name: of the planner.
    """
    judge, request = divided(problem, name), problem.request
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


def _as_if_equal(request: PlanRequest, name: str) -> Iterator[PlanEvaluation]:
    """The best plan for equal devices, on the unequal ones."""
    if len(request.cluster.kinds) > 1:
        equal = exclusive_plans(Problem(UnitTables(as_if_equal(request))), name).best
        found = None if equal is None else evaluate_plan(equal.plan, request)
        if found is not None and found.is_feasible:
            yield found
