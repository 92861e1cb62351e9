"""Judges divisions of units into stages by the step that their plans would take."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_gpp.engine.play import ROUNDING
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.step_time.pipeline_run import PipelineRun, pipeline_run
from lightning_gpp.planner.units.contiguous import StageUnits
from lightning_gpp.planner.units.units import UnitGraph

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
        self._place = {operator.name: place for place, operator in enumerate(request.graph)}
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
            stages.append(Stage(stage, tuple(sorted(names, key=self._place.__getitem__)), (stage,)))
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
        return pipeline_run(self.plan(candidate, planner="candidate"), self._request)
