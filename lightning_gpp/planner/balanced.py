"""The planner ``balanced``: equal work per device, with branches side by side where that helps.

It cuts several topological orders of the operators into contiguous stages (``orders``,
``contiguous``), improves the best of them by moving single units between stages, and judges every
candidate by the time that its step takes when played. So a plan whose branches run in parallel
wins exactly when its schedule is shorter: by the shallower graph, not by a rule.

A simple planner to start from; the search of GraphPipe (arXiv 2406.17145, algorithm 1) also
chooses replicas and micro-batch sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lightning_gpp.engine.play import ROUNDING
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.step_time.pipeline_run import PipelineRun
from lightning_gpp.planner.units.divisions import (
    StageUnits,
    candidate_orders,
    contiguous_cuts,
    neighbours,
    renumbered,
)
from lightning_gpp.planner.units.units import UnitGraph, coarse_units

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
    cuts = (
        cut
        for order in candidate_orders(units)
        for cut in contiguous_cuts(units, order, request.num_devices, request.cluster.slowest_link)
    )
    best = judge.best([*equal_counts(units, request.num_devices), *cuts])
    while judge.has_budget:
        better = judge.best([best, *neighbours(units, best)])
        if better == best:
            break
        best = better
    return judge.plan(best, request.named(NAME))


def balanced_microbatches(request: PlanRequest) -> int:
    """How many there are: those asked for, or enough to fill the pipeline.

    That is twice the number of devices, where the mini-batch has them.
    """
    return request.num_microbatches or min(2 * request.num_devices, request.minibatch_size)


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


BUDGET = 60_000
"""Forwards and backwards to play in one search, and what takes as long; about half a second."""

ACTIONS_PER_PLAN = 100
"""So many forwards and backwards are played in the time of making one plan."""

FEWEST = 8
"""Plans of a search that are played however many forwards and backwards they have."""


class Judge:
    """Compares divisions of units into stages, each played at most once.

    The score is the step time, then the micro-batches in flight over all stages (memory). Those
    whose busiest device computes longer than the best step are not played. A search has a budget,
    counted in forwards and backwards so that it does not depend on a clock.
    """

    def __init__(self, request: PlanRequest, units: UnitGraph, num_microbatches: int) -> None:
        self._request = request
        self._num_microbatches = num_microbatches
        self._units = units
        self._scores: dict[StageUnits, tuple[float, int]] = {}
        self._least_s: dict[StageUnits, float] = {}
        self._runs: dict[StageUnits, PipelineRun] = {}
        self._actions_per_plan = 2 * request.num_devices * num_microbatches

    @property
    def has_budget(self) -> bool:
        """Whether the search may go on."""
        num_played, num_made = len(self._scores), len(self._least_s)
        spent = num_played * self._actions_per_plan + num_made * ACTIONS_PER_PLAN
        return spent < BUDGET

    def best(self, candidates: Iterable[StageUnits]) -> StageUnits:
        """The candidate with the smallest score, the first of equals; the first one is played.

        The others are played, those first whose busiest device computes least, while there is
        budget and until none is left whose step may be shorter.
        """
        best, *others = dict.fromkeys(candidates)
        score = self._score(best)
        bounded = [(self._busiest_s(one), one) for one in others if self.has_budget]
        for least_s, candidate in sorted(bounded, key=lambda found: found[0]):
            is_first = len(self._scores) < FEWEST
            if least_s * (1 - ROUNDING) > score[0] or not (self.has_budget or is_first):
                break
            found = self._score(candidate)
            if found < score:
                best, score = candidate, found
        self._runs.clear()
        return best

    def plan(self, stage_units: StageUnits, planner: str) -> Plan:
        """The plan of a division: stage *i* on device *i*."""
        stages = []
        for stage, members in enumerate(stage_units):
            names = [name for unit in members for name in self._units.operators[unit]]
            in_order = self._request.tables.in_order(tuple(names))
            stages.append(Stage(stage, tuple(in_order), (stage,)))
        return Plan(tuple(stages), planner, self._num_microbatches)

    def _score(self, candidate: StageUnits) -> tuple[float, int]:
        found = self._scores.get(candidate)
        if found is None:
            run = self._runs.get(candidate) or self._run(candidate)
            found = self._scores[candidate] = run.step_s(), sum(run.in_flight.values())
        return found

    def _busiest_s(self, candidate: StageUnits) -> float:
        found = self._least_s.get(candidate)
        if found is None:
            run = self._runs[candidate] = self._run(candidate)
            found = self._least_s[candidate] = run.busiest_s()
        return found

    def _run(self, candidate: StageUnits) -> PipelineRun:
        return PipelineRun(self.plan(candidate, planner="candidate"), self._request)
