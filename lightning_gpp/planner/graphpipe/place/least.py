"""A lower bound of a draft's step, and whether it can run at all, from tables.

What :func:`lightning_gpp.planner.step_time.least_step.least_step_s` says of the plan of the draft,
without making it: most moves of a search are looked at no closer.
"""

from __future__ import annotations

import math

from lightning_gpp.graph import FEED
from lightning_gpp.planner.graphpipe.place.draft import Draft, DraftStage, Units
from lightning_gpp.planner.graphpipe.place.unit_tables import UnitTables
from lightning_gpp.planner.plan.plan import Stage
from lightning_gpp.planner.request_tables import transfer_s
from lightning_gpp.planner.step_time.gradients import stage_sums
from lightning_gpp.planner.step_time.least_step import TimedEdge, TimedStage, least_step_s
from lightning_gpp.planner.step_time.stage_costs import stage_compute

Seconds = tuple[float, float | None]


class DraftBounds:
    """Lower bounds of the steps of drafts.

    Args:
        tables: of their units.
    """

    def __init__(self, tables: UnitTables) -> None:
        self._tables = tables
        self._request = tables.request
        self._stages: dict[tuple[DraftStage, int], TimedStage] = {}
        self._edges: dict[tuple[object, ...], Seconds | None] = {}
        self._fixed: dict[Units, int] = {}
        self._limits = [device.memory_bytes for device in self._request.cluster.devices]
        self._has_limits = any(limit is not None for limit in self._limits)

    def __call__(self, draft: Draft) -> float:
        """Seconds that a step takes at least; infinite where the draft cannot run."""
        parts, count = draft.stages, draft.num_microbatches
        if self._request.minibatch_size < count or not self._may_fit(parts):
            return math.inf
        stages = []
        for part in parts:
            if count % part.multiple or not self._may_run(part):
                return math.inf
            stages.append(self._stage(part, count))
        ends: list[tuple[Units, tuple[int, ...], int]] = [part[:3] for part in parts]
        last = parts[-1]
        if last.num_replicas > 1:  # the loss is a stage of its own
            ends.append((0, last.devices[:1], last.multiple))
            stages.append(TimedStage(last.multiple, 1, count // last.multiple, 0.0, 0.0))
        edges = self._all_edges(ends, count)
        if edges is None:
            return math.inf
        if any(part.shares for part in parts):
            return max(stage.work_s for stage in stages)
        return least_step_s(stages, edges, _residents(parts))

    def _may_run(self, part: DraftStage) -> bool:
        """Whether a part keeps to the rules of a stage."""
        if part.num_replicas > 1 or part.recompute:
            return part.multiple % part.num_replicas == 0 and not self._tables.has_state(part.units)
        return True

    def _may_fit(self, parts: tuple[DraftStage, ...]) -> bool:
        """Whether the parameters alone leave room on every device."""
        if not self._has_limits:
            return True
        used = [0] * len(self._limits)
        for part in parts:
            fixed = self._fixed.get(part.units)
            if fixed is None:
                operators = self._tables.operators(part.units)
                all_bytes, trained = self._request.tables.parameter_bytes(operators)
                fixed = all_bytes + trained * (1 + self._request.optimizer_values)
                self._fixed[part.units] = fixed
            for device in part.devices:
                used[device] += fixed
        return all(limit is None or size <= limit for size, limit in zip(used, self._limits))

    def _stage(self, part: DraftStage, count: int) -> TimedStage:
        key = part, count
        found = self._stages.get(key)
        if found is None:
            request = self._request
            unit_size = request.minibatch_size / count
            stage = Stage(0, self._tables.operators(part.units), *part[1:])
            compute = stage_compute(request, stage, unit_size)
            end_s = 0.0
            if part.num_replicas > 1:
                own = self._tables.own_parameters(part.units)
                end_s = stage_sums(request, stage, unit_size, own).after_s
            found = self._stages[key] = TimedStage(
                part.multiple,
                part.num_replicas,
                count // part.multiple,
                compute.forward_s,
                compute.backward_s,
                end_s,
            )
        return found

    def _all_edges(
        self, ends: list[tuple[Units, tuple[int, ...], int]], count: int
    ) -> list[TimedEdge] | None:
        """The edges between stages, those of the feed first; None where one cannot be."""
        tables, found = self._tables, []
        last = len(ends) - 1
        feed = 0, ends[-1][1][:1], ends[-1][2]
        sources = [tables.sources(units) for units, _, _ in ends]
        for target, other in enumerate(ends):
            edge = self._edge(feed, other, count, target == last)
            if edge is None:
                return None
            if edge[0] >= 0:
                found.append(TimedEdge(FEED, target, edge[0], None))
        for source, own in enumerate(ends):
            units = own[0]
            has_output = units & tables.makers
            for target in range(source + 1, len(ends)):
                if sources[target] & units or (target == last and has_output):
                    edge = self._edge(own, ends[target], count, target == last)
                    if edge is None:
                        return None
                    if edge[0] >= 0:
                        found.append(TimedEdge(source, target, *edge))
        return found

    def _edge(
        self,
        source: tuple[Units, tuple[int, ...], int],
        target: tuple[Units, tuple[int, ...], int],
        count: int,
        is_last: bool,
    ) -> Seconds | None:
        """Seconds there and back; negative where there is no edge, None where none may be."""
        key = source, target, count, is_last
        if key in self._edges:
            return self._edges[key]
        found = self._edges[key] = self._new_edge(source, target, count, is_last)
        return found

    def _new_edge(
        self,
        source: tuple[Units, tuple[int, ...], int],
        target: tuple[Units, tuple[int, ...], int],
        count: int,
        is_last: bool,
    ) -> Seconds | None:
        units, senders, multiple = source
        carried = self._tables.carried(units, target[0], takes_outputs=is_last)
        if not carried.values:
            return -1.0, None
        other = target[2]
        if units and max(multiple, other) % min(multiple, other):
            return None
        shares = multiple // len(senders), other // len(target[1])
        if shares[0] != shares[1] and not carried.is_cuttable:
            return None
        request = self._request
        samples = math.gcd(*shares) * request.minibatch_size / count
        sizes = request.tables.edge_bytes(carried.values, has_backward=carried.has_backward)
        links = request.tables.links(senders, target[1])
        there_s = min([transfer_s(link, sizes.forward(samples)) for link in links])
        if not carried.has_backward or not units:
            return there_s, None
        return there_s, min([transfer_s(link, sizes.backward(samples)) for link in links])


def _residents(parts: tuple[DraftStage, ...]) -> dict[int, list[int]]:
    """The stages of every device."""
    found: dict[int, list[int]] = {}
    for number, part in enumerate(parts):
        for device in part.devices:
            found.setdefault(device, []).append(number)
    return {device: stages for device, stages in found.items() if len(stages) > 1}
