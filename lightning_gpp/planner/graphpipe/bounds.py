"""Lower bounds of a draft's step, from tables.

Without making the plan of the draft: most moves of a search are looked at no closer.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain
from typing import NamedTuple

from lightning_gpp.common.cached_method import cached_method
from lightning_gpp.graph import FEED
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.graphpipe.draft import (
    Crossing,
    Draft,
    DraftStage,
    Units,
    UnitTables,
    draft_of,
    places,
)
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.request_tables import transfer_s
from lightning_gpp.planner.step_time.gradients import stage_sums
from lightning_gpp.planner.step_time.least_step import TimedEdge, TimedStage, least_step_s
from lightning_gpp.planner.step_time.stage_costs import replica_computes

EdgeSeconds = tuple[float, float | None, float, float]
"""Seconds of messages, all of them at least; those of a :class:`TimedEdge`."""

NOTHING: EdgeSeconds = (-1.0, None, 0.0, 0.0)
"""Of an edge that is none."""

UNTIMED: EdgeSeconds = (0.0, None, 0.0, 0.0)
"""Of an edge between unequal shares, which no bound asks for."""

End = tuple[Units, tuple[int, ...], int, tuple[int, ...]]
"""Of an edge: units, devices and micro-batches of a stage, and the shares of unequal replicas."""


class _Line(NamedTuple):
    """A stage as lines of time.

    Attributes:
        replica_s: seconds of a forward and a backward of every replica.
        work_s: seconds of all of them.
    """

    replica_s: tuple[tuple[float, float], ...]
    work_s: tuple[float, ...]


class DraftBounds:
    """Lower bounds of the steps of drafts.

    Args:
        tables: of their units.
    """

    def __init__(self, tables: UnitTables) -> None:
        self._tables = tables
        self._request = tables.request
        self._numbers: dict[tuple[End, int], int] = {}
        self._edges: dict[tuple[int, int, bool], EdgeSeconds | None] = {}
        self._has_kinds = len(self._request.cluster.kinds) > 1

    def busiest_s(self, draft: Draft) -> float:
        """Seconds that the busiest device computes; infinite where the draft cannot run.

        Whether the stages have an order, and fit into memory, is not asked.
        """
        stages, count = draft.stages, draft.num_microbatches
        if self._request.minibatch_size < count:
            return math.inf
        busy_s = [0.0] * self._request.num_devices
        for stage in stages:
            line = self._line(stage, count)
            if line is None:
                return math.inf
            for device, work_s in zip(stage.devices, line.work_s):
                busy_s[device] += work_s
        return max(busy_s)

    def least_s(self, draft: Draft, *, is_chain: bool = False) -> float:
        """Seconds that a step takes at least; infinite where the draft cannot run.

        Args:
            draft: with its stages in order, and otherwise able to run.
            is_chain: whether every stage waits for the one before it.
        """
        count = draft.num_microbatches
        timed = [self._timed_stage(stage, count) for stage in draft.stages]
        ends: list[End] = [(*stage[:3], stage.shares) for stage in draft.stages]
        last = draft.stages[-1]
        if last.num_replicas > 1:  # the loss is a stage of its own
            ends.append((0, last.devices[:1], last.multiple, ()))
            timed.append(TimedStage(last.multiple, 1, count // last.multiple, 0.0, 0.0))
        edges = self._all_edges(ends, count, is_chain=is_chain)
        if edges is None:
            return math.inf
        if any(stage.shares for stage in draft.stages):
            return self.busiest_s(draft)
        least_s = least_step_s(timed, edges, _residents(ends))
        return max(least_s, self.busiest_s(draft)) if self._has_kinds else least_s

    @cached_method
    def _line(self, stage: DraftStage, count: int) -> _Line | None:
        """A stage as lines of time; None where it does not keep to the rules of a stage."""
        if count % stage.multiple:
            return None
        if stage.num_replicas > 1 or stage.recompute:
            is_even = stage.shares or stage.multiple % stage.num_replicas == 0
            if not is_even or self._tables.has_state(stage.units):
                return None
        unit_size = self._request.minibatch_size / count
        planned = Stage(0, self._tables.operators(stage.units), *stage[1:])
        computes = replica_computes(self._request, planned, unit_size)
        times = count // stage.multiple
        return _Line(
            tuple([(one.forward_s, one.backward_s) for one in computes]),
            tuple([times * (one.forward_s + one.backward_s) for one in computes]),
        )

    @cached_method
    def _timed_stage(self, stage: DraftStage, count: int) -> TimedStage:
        """A stage with the seconds that none of its replicas goes below."""
        request, line = self._request, self._line(stage, count)
        assert line is not None  # the draft can run
        end_s = 0.0
        if stage.num_replicas > 1:
            own = self._tables.own_parameters(stage.units)
            planned = Stage(0, self._tables.operators(stage.units), *stage[1:])
            end_s = stage_sums(request, planned, request.minibatch_size / count, own).after_s
        forward_s, backward_s = map(min, zip(*line.replica_s))
        times = count // stage.multiple
        return TimedStage(stage.multiple, stage.num_replicas, times, forward_s, backward_s, end_s)

    def _all_edges(self, ends: list[End], count: int, *, is_chain: bool) -> list[TimedEdge] | None:
        """The edges between stages, none before those to its source; None where one cannot be."""
        tables, found = self._tables, []
        last, feed = len(ends) - 1, (0, ends[-1][1][:1], ends[-1][2], ())
        numbers = [
            self._numbers.setdefault((end, count), len(self._numbers)) for end in (*ends, feed)
        ]
        owner = {at: number for number, end in enumerate(ends) for at in places(end[0])}
        for target, other in enumerate(ends):
            is_last = target == last
            needed = tables.sources(other[0]) | (tables.makers & ~other[0] if is_last else 0)
            sources = sorted({owner[at] for at in places(needed)})
            if is_last or other[0] & tables.fed:
                sources.insert(0, FEED)
            for source in sources:
                key = numbers[source], numbers[target], is_last
                if key not in self._edges:
                    own = feed if source == FEED else ends[source]
                    self._edges[key] = self._edge(own, other, count, is_last)
                edge = self._edges[key]
                if edge is None:
                    return None
                if edge is not NOTHING:
                    found.append(TimedEdge(source, target, *edge))
            if is_chain and target and target - 1 not in sources:
                found.append(TimedEdge(target - 1, target, 0.0, 0.0))
        return found

    def _edge(self, source: End, target: End, count: int, is_last: bool) -> EdgeSeconds | None:
        """What its messages take; nothing where there is no edge, None where none may be."""
        units, _, multiple, shares = source
        carried = self._tables.carried(units, target[0], takes_outputs=is_last)
        if not carried.values:
            return NOTHING
        other = target[2]
        if units and max(multiple, other) % min(multiple, other):
            return None
        if not carried.is_cuttable and not _takes_the_same(source, target):
            return None
        is_there = not units and self._request.feeds_ahead
        if shares or target[3] or is_there:
            return UNTIMED
        return _edge_seconds(self._request, carried, source, target, count)


def _takes_the_same(source: End, target: End) -> bool:
    """Whether values go from replica to replica as they are, as a valid plan has them."""
    multiples = {*(source[3] or (_share(source),)), *(target[3] or (_share(target),))}
    return len(multiples) == 1 or (source[3] == target[3] != ())


def _residents(ends: list[End]) -> dict[int, list[int]]:
    """The stages of every device that holds several."""
    used = Counter(chain.from_iterable([end[1] for end in ends]))
    several = {device for device, count in used.items() if count > 1}
    found: dict[int, list[int]] = {device: [] for device in several}
    for number, end in enumerate(ends):
        for device in several.intersection(end[1]):
            found[device].append(number)
    return found


def _edge_seconds(
    request: PlanRequest, carried: Crossing, source: End, target: End, count: int
) -> EdgeSeconds:
    """What the messages between two stages of equal replicas take, all of them at least.

    Args:
        request: the links and the mini-batch.
        carried: what crosses.
        source: sends activations; one device if it is the feed.
        target: receives them.
        count: smallest micro-batches of a mini-batch.
    """
    tables = request.tables
    sizes = tables.edge_bytes(carried.values, has_backward=carried.has_backward)
    links = tables.links(source[1], target[1])
    samples = math.gcd(_share(source), _share(target)) * (request.minibatch_size / count)

    def one_way(sender: End, receiver: End, size_bytes: float) -> tuple[float, float]:
        """Seconds of a message, and of all that any replica sends through its busiest port.

        One device sends as much to every replica; of several each has its part of the messages.
        """
        least_s = min([transfer_s(link, size_bytes) for link in links])
        num_senders, num_receivers = len(sender[1]), len(receiver[1])
        own, other = _share(sender), _share(receiver)
        if num_senders > 1 or num_receivers == 1:
            each = count / num_senders / own
            return least_s, each * max(1, own // other) * least_s / tables.num_ports
        each = count / num_receivers / other
        leaving = tables.links_from(sender[1][0], receiver[1])
        all_s = sum([n * transfer_s(link, size_bytes) for link, n in leaving.items()])
        return least_s, each * max(1, other // own) * all_s / tables.num_ports

    there_s, sent_s = one_way(source, target, sizes.forward(samples))
    if not (carried.has_backward and source[0]):
        return there_s, None, sent_s, 0.0
    back_s, sent_back_s = one_way(target, source, sizes.backward(samples))
    return there_s, back_s, sent_s, sent_back_s


def _share(end: End) -> int:
    """Smallest micro-batches in one of a replica."""
    return end[2] // len(end[1])


def least_plan_s(plan: Plan, request: PlanRequest) -> float:
    """Seconds that a step takes at least; 0 where a plan cuts what the search keeps whole."""
    tables = UnitTables(request)
    draft = draft_of(plan, tables)
    return 0.0 if draft is None else DraftBounds(tables).least_s(draft, is_chain=plan.is_chain)
