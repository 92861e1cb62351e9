"""The planner ``balanced``: equal work per device, with branches side by side where that helps.

It cuts several topological orders of the operators into contiguous stages (``orders``,
``contiguous``), improves the best of them by moving single units between stages, and judges every
candidate by the time that its step takes when played. So a plan whose branches run in parallel
wins exactly when its schedule is shorter: by the shallower graph, not by a rule.

A simple planner to start from; the search of GraphPipe (arXiv 2406.17145, algorithm 1) also
chooses replicas and micro-batch sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.step_time.judge import Judge
from lightning_gpp.planner.units.coarsen import coarse_units
from lightning_gpp.planner.units.contiguous import StageUnits, contiguous_cuts
from lightning_gpp.planner.units.moves import neighbours, renumbered
from lightning_gpp.planner.units.orders import candidate_orders
from lightning_gpp.planner.units.units import UnitGraph

NAME = "balanced"


def balanced(request: PlanRequest) -> Plan:
    """One stage per device, all devices used.

    Raises:
        ValueError: there are more devices than units that can be separated.
    """
    num_microbatches = balanced_microbatches(request)
    profile = request.profile(request.minibatch_size / num_microbatches)
    units = coarse_units(request.graph, profile, request.num_devices)
    _check_enough(units, request)
    judge = Judge(request, units, num_microbatches)
    best = judge.best([*equal_counts(units, request.num_devices), *_cuts(units, request)])
    while judge.has_budget:
        better = judge.best([best, *neighbours(units, best)])
        if better == best:
            break
        best = better
    name = f"{NAME} (estimated)" if request.is_estimated else NAME
    return judge.plan(best, name)


def balanced_microbatches(request: PlanRequest) -> int:
    """How many there are: those asked for, or enough to fill the pipeline.

    That is twice the number of devices, where the mini-batch has them.
    """
    return request.num_microbatches or min(2 * request.num_devices, request.minibatch_size)


def _cuts(units: UnitGraph, request: PlanRequest) -> Iterator[StageUnits]:
    link = request.cluster.slowest_link
    for order in candidate_orders(units):
        yield from contiguous_cuts(units, order, request.num_devices, link)


def equal_counts(units: UnitGraph, num_stages: int) -> Iterator[StageUnits]:
    """The naive division, as many units in every stage, in the order of the model.

    It is a candidate like others, so that no plan is worse than it. There is none where no output
    is made at the end of the model.
    """
    stage_of = [unit * num_stages // len(units) for unit in range(len(units))]
    naive = renumbered(units, stage_of)
    if naive is not None:
        yield naive


def _check_enough(units: UnitGraph, request: PlanRequest) -> None:
    if len(units) >= request.num_devices:
        return
    together = len(request.graph) - len(units)
    because = f" ({together} more must stay with others: common state)" if together else ""
    raise ValueError(
        f"{request.num_devices} devices need as many stages, but the model has only {len(units)} "
        f"operators that can be separated{because}; use at most {len(units)} devices, or make the "
        "model's leaf modules smaller"
    )
