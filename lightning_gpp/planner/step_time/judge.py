"""Judges candidate plans by the step time of their programs."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_gpp.graph import FEED
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.step_time.predict import predict
from lightning_gpp.planner.units.contiguous import StageUnits
from lightning_gpp.planner.units.units import UnitGraph

DRY_RUN_ACTIONS = 40_000
"""Compute actions to play in all dry runs of one search; about two seconds."""

FEWEST_DRY_RUNS = 8
"""Dry runs of a search that are played however large the programs are."""

PROMISING = 24
"""Candidates that are played per step of the search."""


class Judge:
    """Compares divisions of units into stages, each played at most once.

    The score is the step time, then the micro-batches in flight over all stages (memory).
    A search has a budget of dry runs, counted in actions so that it does not depend on a clock.
    """

    def __init__(self, request: PlanRequest, units: UnitGraph, num_microbatches: int) -> None:
        self._request = request
        self._num_microbatches = num_microbatches
        self._profile = request.profile(request.minibatch_size / num_microbatches)
        self._units = units
        self._scores: dict[StageUnits, tuple[float, int]] = {}
        actions = 2 * request.num_devices * num_microbatches
        self._max_dry_runs = max(FEWEST_DRY_RUNS, DRY_RUN_ACTIONS // actions)

    @property
    def has_budget(self) -> bool:
        """Whether the search may go on."""
        return len(self._scores) < self._max_dry_runs

    def best(self, candidates: Iterable[StageUnits]) -> StageUnits:
        """The candidate with the smallest score, the first of equals."""
        return min(candidates, key=self._score)

    def most_promising(self, candidates: Iterable[StageUnits]) -> list[StageUnits]:
        """The few candidates that a formula finds best."""
        ranked = sorted(dict.fromkeys(candidates), key=self._quick_score)
        return ranked[: min(PROMISING, self._max_dry_runs - len(self._scores))]

    def plan(self, stage_units: StageUnits, planner: str) -> Plan:
        """The plan of a division: stage *i* on device *i*."""
        position = {operator.name: place for place, operator in enumerate(self._request.graph)}
        stages = []
        for stage, members in enumerate(stage_units):
            names = [name for unit in members for name in self._units.operators[unit]]
            stages.append(Stage(stage, tuple(sorted(names, key=position.__getitem__)), (stage,)))
        return Plan(tuple(stages), planner, self._num_microbatches)

    def _score(self, candidate: StageUnits) -> tuple[float, int]:
        if candidate not in self._scores:
            run = predict(
                self.plan(candidate, planner="candidate"),
                self._request.graph,
                profile=self._profile,
                num_microbatches=self._num_microbatches,
                schedule=self._request.schedule,
                cluster=self._request.cluster,
            )
            self._scores[candidate] = run.step_s, sum(run.in_flight.values())
        return self._scores[candidate]

    def _quick_score(self, candidate: StageUnits) -> tuple[float, int]:
        """Step time by formula (one micro-batch all the way, then the bottleneck), and bytes."""
        compute_s = [sum(self._units.compute_s[unit] for unit in units) for units in candidate]
        way_s = dict(enumerate(compute_s)) | {FEED: 0.0}
        edge_bytes = self._edge_bytes(candidate)
        for (source, target), size_bytes in sorted(edge_bytes.items()):
            # Sorted by source, so the way to the source is complete.
            transfer_s = self._request.cluster.slowest_link.transfer_s(size_bytes)
            way_s[target] = max(way_s[target], way_s[source] + transfer_s + compute_s[target])
        step_s = max(way_s.values()) + (self._num_microbatches - 1) * max(compute_s)
        return step_s, sum(edge_bytes.values())

    def _edge_bytes(self, candidate: StageUnits) -> dict[tuple[int, int], int]:
        """Bytes on the edges between devices; the feed is on the last one."""
        stage_of = {unit: stage for stage, units in enumerate(candidate) for unit in units}
        last = len(candidate) - 1
        sizes: dict[tuple[int, int], int] = {}
        for flow in self._units.flows:
            is_feed = flow.source == FEED
            source = FEED if is_feed else stage_of[flow.source]
            targets = {stage_of[target] for target in flow.targets}
            targets |= {last} if flow.is_output else set()
            for target in targets - {last if is_feed else source}:
                sizes[source, target] = sizes.get((source, target), 0) + flow.step_bytes
        return sizes
