"""Searches where stages own their devices: the published space, chains, and one stage a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.data_parallel import shared_by_all
from lightning_gpp.planner.graphpipe.climb import BUDGET, climb_from
from lightning_gpp.planner.graphpipe.deals import best_deals
from lightning_gpp.planner.graphpipe.judged import DraftJudge
from lightning_gpp.planner.graphpipe.own_homes import OwnHomes
from lightning_gpp.planner.graphpipe.unit_tables import UnitTables
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, evaluate_plan


def chains(tables: UnitTables, name: str, *, takes_first: bool = False) -> DraftJudge:
    """A judge that has seen chains: every stage waits for the one before it.

    Args:
        tables: of the units.
        name: of the planner.
        takes_first: whether any plan that fits into memory ends the search.
    """
    budget = BUDGET // (8 if takes_first else 2)
    judge = DraftJudge(tables, name, budget, is_chain=True, takes_first=takes_first)
    _climb(judge, _shared(tables, name))
    return judge


def graphs(tables: UnitTables, name: str, others: Iterable[PlanEvaluation]) -> DraftJudge:
    """A judge that has seen graphs of stages, from other plans, replicas of all, and deals.

    Args:
        tables: of the units.
        name: of the planner.
        others: plans to begin with.
    """
    judge = DraftJudge(tables, name, BUDGET)
    _climb(judge, [*others, *_shared(tables, name)])
    return judge


def balanced_plan(request: PlanRequest, name: str) -> PlanEvaluation | None:
    """The best plan of one stage per device without replicas; None where there is none.

    Where none fits into memory it is the one that lacks least. Devices have the numbers of their
    stages where that is as good.

    Args:
        request: the question, with the number of micro-batches.
        name: of the planner.
    """
    own = replace(request, max_replicas=1)
    judge = DraftJudge(UnitTables(own), name, BUDGET // 2, least_devices=request.num_devices)
    climb_from(judge, (), best_deals(judge, may_share=False), OwnHomes)
    plan = judge.best.plan if judge.best else judge.closest[2] if judge.closest else None
    if plan is None:
        return None
    found = evaluate_plan(plan, own)
    stages = tuple(replace(stage, devices=(stage.id,)) for stage in plan.stages)
    in_order = evaluate_plan(replace(plan, stages=stages), own)
    return min(in_order, found, key=lambda one: (not one.is_feasible, one.step_s))


def _climb(judge: DraftJudge, starts: Iterable[PlanEvaluation]) -> None:
    drafts = [draft for draft, _ in judge.drafts(starts)]
    own = [(draft, judge.step_s(draft, float("inf"))) for draft in dict.fromkeys(drafts)]
    climb_from(judge, own, best_deals(judge, may_share=False), OwnHomes)


def _shared(tables: UnitTables, name: str) -> list[PlanEvaluation]:
    found = shared_by_all(tables.request, name)
    return [] if found is None else [found]
