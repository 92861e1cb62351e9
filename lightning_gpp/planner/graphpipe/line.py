"""Divisions of a model in a line into stages that own their devices: where searches begin.

The dual of ``DP`` in algorithm 1 of GraphPipe (arXiv 2406.17145, section 5.2): for a limit on every
stage's seconds per sample, how much of the model the last devices can run. Like it, it goes from
the end of the model to its beginning, as the micro-batches in flight of a stage depend on the
stages behind it. Units stand in the depth-first order, in which branches stay together. Of what
the last devices can run only the longest end of the model is kept; the climb that follows mends
what that misses.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from itertools import accumulate, product
from typing import NamedTuple

from lightning_gpp.cluster import all_reduce_s
from lightning_gpp.common.cached_method import cached_method
from lightning_gpp.engine.play import ROUNDING
from lightning_gpp.planner.graphpipe.draft import Draft, DraftStage, UnitTables
from lightning_gpp.planner.graphpipe.homes import given_out
from lightning_gpp.planner.graphpipe.judge import FEW_DEVICES, DraftJudge
from lightning_gpp.planner.step_time.stage_costs import users_step_bytes

NEAR = 1.02
"""The smallest limit is found to this factor; then come slower ones, in growing steps from it."""


class Cut(NamedTuple):
    """A stage and all that follow it; without devices it is the end of the model.

    Attributes:
        start: the first place of its units.
        stop: the place behind its last unit.
        kind: of its devices.
        num_replicas: how many they are.
        multiple: its micro-batch in smallest ones.
        recompute: whether it runs its forward again.
        in_flight: smallest micro-batches that it holds at its peak.
        seconds: per sample.
        rest: the stages behind it.
    """

    start: int
    stop: int = 0
    kind: str = ""
    num_replicas: int = 0
    multiple: int = 0
    recompute: bool = False
    in_flight: int = 0
    seconds: float = 0.0
    rest: Cut | None = None

    def stages(self) -> Iterator[Cut]:
        """All stages, this one first."""
        cut: Cut | None = self
        while cut is not None and cut.num_replicas:
            yield cut
            cut = cut.rest


class RunningSums(NamedTuple):
    """Running sums over the places, for a replica's share of a micro-batch."""

    seconds: list[float]
    forward_s: list[float]
    activation_bytes: list[float]


class UnitLine:
    """The units of a model in a line, to be divided with one size of micro-batches.

    Args:
        tables: of the units.
        size: samples of a smallest micro-batch.
        kinds: of all devices, in the order in which stages get them.
        take_turns: whether replicas take whole micro-batches in turn; otherwise they share each.
        hides_sums: whether all-reduces are taken to cost nothing, as beside a long backward.
        starts: for every place, the first one from it on where a stage may begin; None: itself.
    """

    def __init__(
        self,
        tables: UnitTables,
        size: float,
        kinds: Sequence[str],
        *,
        take_turns: bool,
        hides_sums: bool,
        starts: Sequence[int] | None = None,
    ) -> None:
        request = self._request = tables.request
        self._tables, self._size, self._kinds = tables, size, kinds
        self._take_turns, self._hides_sums, self._starts = take_turns, hides_sums, starts
        self._count, self._holds_all = round(request.minibatch_size / size), request.holds_all
        self._counts = cache(request.replica_counts)
        self._operators = [tables.operators(1 << at) for at in range(tables.num_units)]
        held = [request.tables.parameter_bytes(names) for names in self._operators]
        self._parameters = [*accumulate((one.all_bytes for one in held), initial=0)]
        self._trained = [*accumulate((one.trained_bytes for one in held), initial=0)]
        has_state = [tables.has_state(1 << at) for at in range(tables.num_units)]
        changed = (at + 1 if found else 0 for at, found in enumerate(has_state))
        self._after_state = [*accumulate(changed, max, initial=0)]
        self._step_bytes = users_step_bytes(request, size, in_flight=1)
        self._memory_bytes: dict[str, float] = {}
        for device in request.cluster.devices:
            own = math.inf if device.memory_bytes is None else device.memory_bytes
            self._memory_bytes[device.kind] = min(own, self._memory_bytes.get(device.kind, own))

    def drafts(self) -> Iterator[Draft]:
        """The divisions, each with its devices given out in different ways.

        In the order of the stages, so that neighbours are in one host; and with the first choice
        for those with most replicas, so that their groups do not lie across hosts.
        """
        devices_of = self._tables.devices_of
        for cuts in (tuple(first.stages()) for first in self.divisions()):
            parts = max(-(-one.num_replicas // one.multiple) for one in cuts)
            by_size = sorted(range(len(cuts)), key=lambda number: -cuts[number].num_replicas)
            wanted = [(one.kind, one.num_replicas) for one in cuts]
            ways = given_out(wanted, devices_of), given_out(wanted, devices_of, by_size)
            for groups in dict.fromkeys(way for way in ways if way is not None):
                stages = []
                for one, devices in zip(cuts, groups):
                    units = (1 << one.stop) - (1 << one.start)
                    taken = parts * one.multiple, one.recompute
                    stages.append(DraftStage(units, devices, *taken))
                yield Draft(tuple(stages), self._count * parts).reduced()

    def divisions(self) -> Iterator[Cut]:
        """Divisions on the way to the smallest bottleneck, and some slower ones."""
        found, low_s = self._within(math.inf), 0.0
        if found is None:
            return
        yield found
        whole_s = high_s = _slowest_s(found)
        while low_s * NEAR < high_s:
            limit_s = math.sqrt(low_s * high_s) or high_s / 2
            found = self._within(limit_s)
            if found is None:
                low_s = limit_s
            else:
                yield found
                high_s = _slowest_s(found)
        step = NEAR
        while high_s * step < whole_s:
            if (found := self._within(high_s * step)) is not None:
                yield found
            step **= 2

    def _within(self, limit_s: float) -> Cut | None:
        """The stages that keep to a limit of seconds per sample; None where none were found."""
        kinds, limit_s = self._kinds, limit_s * (1 + ROUNDING)
        best = [Cut(self._tables.num_units)]  # on no devices, on the last one, …
        alike = 0
        for first in reversed(range(len(kinds))):
            alike = alike + 1 if kinds[first] == kinds[min(first + 1, len(kinds) - 1)] else 1
            found = best[-1]
            for count in self._counts(alike):
                found = self._longer(found, best[-count], count, kinds[first], limit_s)
            if not found.start:
                return found
            best.append(found)
        return None

    def _longer(self, found: Cut, rest: Cut, num_replicas: int, kind: str, limit_s: float) -> Cut:
        """The longest stage before others, recomputed or not, if it is longer than what is found.

        Of two that are as long, the one that holds fewer micro-batches.
        """
        stop = rest.start
        shared = self._count if self._take_turns else self._size
        if not stop or (num_replicas > 1 and shared % num_replicas):
            return found
        multiple = num_replicas if self._take_turns else 1
        for recompute in (False, True)[: 1 + self._request.may_recompute]:
            is_bound = num_replicas > 1 or recompute
            least = self._after_state[stop] if is_bound else 0
            pace = self._pace(num_replicas, kind, recompute=recompute)
            start = bisect_left(pace, pace[stop] - limit_s, least, stop)
            if start > found.start:  # by its seconds alone
                continue
            in_flight = self._in_flight(rest, multiple, num_replicas)
            cut = Cut(start, stop, kind, num_replicas, multiple, recompute, in_flight, 0.0, rest)
            start = self._first_that_fits(cut, start)
            if self._starts is not None:
                start = min(self._starts[start], stop)
            if start < stop and (start, in_flight) < (found.start, found.in_flight):
                found = cut._replace(start=start, seconds=pace[stop] - pace[start])
        return found

    def _in_flight(self, rest: Cut, multiple: int, num_replicas: int) -> int:
        """Smallest micro-batches in flight of a stage before others: the rule of schedules."""
        most = self._count // multiple * multiple
        if self._holds_all:
            return most
        if rest.num_replicas:
            count = max(
                rest.in_flight + rest.multiple, rest.in_flight - rest.multiple + 2 * multiple
            )
        else:  # the loss of replicas is a stage of its own
            count = multiple * min(num_replicas, 2)
        return min(-(-count // multiple) * multiple, most)

    def _first_that_fits(self, cut: Cut, start: int) -> int:
        """The first place from one on at which a stage fits into memory; its end if there is none.

        It needs less the later it begins.
        """
        stop, count = cut.stop, cut.in_flight // cut.multiple
        share = self._size * cut.multiple / cut.num_replicas
        room = self._memory_bytes[cut.kind]
        if stop == self._tables.num_units:  # the loss is where the last stage is
            room -= self._step_bytes
        held = self._held(share, cut.kind, count, recompute=cut.recompute)
        if not cut.recompute:
            return bisect_left(held, held[stop] - room, start, stop)
        places, read_bytes = range(stop), count * share  # what it reads is kept
        return bisect_left(
            places,
            True,
            start,
            key=lambda at: held[stop] - held[at] + read_bytes * self._crossing[at] <= room,
        )

    @cached_method
    def _held(self, share: float, kind: str, count: int, *, recompute: bool) -> list[float]:
        """Running sums of the bytes of a stage with so many micro-batches in flight."""
        kept, times = self._sums(share, kind).activation_bytes, 1 if recompute else count
        copies, values = self._request.held_versions.of(count), 1 + self._request.optimizer_values
        return [
            copies * all_bytes + values * trained + times * own
            for all_bytes, trained, own in zip(self._parameters, self._trained, kept)
        ]

    @cached_method
    def _pace(self, num_replicas: int, kind: str, *, recompute: bool) -> list[float]:
        """Running sums of the seconds per sample of a stage."""
        multiple = num_replicas if self._take_turns else 1
        sums, size = self._sums(self._size * multiple / num_replicas, kind), self._size * multiple
        seconds = sums.seconds
        if recompute:
            seconds = [own + again for own, again in zip(seconds, sums.forward_s)]
        sum_s = 0.0  # per byte
        if num_replicas > 1 and not self._hides_sums:
            cluster, devices = self._request.cluster, range(num_replicas)
            sum_s = all_reduce_s(cluster, devices, MANY_BYTES) / MANY_BYTES
        per_byte_s = sum_s / self._request.minibatch_size
        return [own / size + held * per_byte_s for own, held in zip(seconds, self._trained)]

    @cached_method
    def _sums(self, share: float, kind: str) -> RunningSums:
        """RunningSums of what so many samples take and keep on a kind of device."""
        costs = self._request.profile(share, kind).operators
        forward_s = (sum(costs[n].forward_s for n in names) for names in self._operators)
        kept = (sum(costs[n].activation_bytes for n in names) for names in self._operators)
        seconds = self._tables.each_s(share, kind)
        return RunningSums(
            *([*accumulate(each, initial=0.0)] for each in (seconds, forward_s, kept))
        )

    @cached_property
    def _crossing(self) -> list[float]:
        """For every place, bytes per sample of the values that cross its border."""
        found = [0.0] * (self._tables.num_units + 1)
        for name, places in _crossed(self._tables):
            size_bytes = self._request.tables.edge_bytes((name,)).per_sample
            for place in places:
                found[place] += size_bytes
        return found


MANY_BYTES = 10**9
"""Of an all-reduce for which its latency does not count."""


def _crossed(tables: UnitTables) -> Iterator[tuple[str, range]]:
    """Values, and the places whose borders they cross."""
    for at, values in tables.made.items():
        for name, readers, _ in values:
            yield name, range(at + 1, readers.bit_length())


def narrow_starts(tables: UnitTables) -> list[int]:
    """For every place, the first one from it on where at most one value crosses.

    As between blocks of branches: other borders cost more messages, and let a stage wait for
    several others.
    """
    crossing = Counter(place for _, places in _crossed(tables) for place in places)
    found = [*range(tables.num_units + 1)]
    for place in reversed(found[:-1]):
        if crossing[place] > 1:
            found[place] = found[place + 1]
    return found


def _slowest_s(cut: Cut) -> float:
    return max(one.seconds for one in cut.stages())


def _lines(tables: UnitTables, starts: Sequence[int] | None) -> Iterator[UnitLine]:
    """The line with every size of micro-batches, kinds of devices in both orders."""
    request = tables.request
    kinds = [device.kind for device in request.cluster.devices]
    grouped = sorted(kinds, key=request.cluster.kinds.index)
    has_replicas = max(request.replica_counts(request.num_devices)) > 1
    values = request.graph.values.values()
    can_differ = request.num_microbatches is None and all(one.is_cuttable for one in values)
    is_small = has_replicas and request.num_devices <= FEW_DEVICES  # otherwise this takes too long
    for hides_sums, size, take_turns, order in product(
        (True, False)[: 1 + is_small],
        reversed(request.microbatch_sizes),
        (False, True)[: 1 + (can_differ and has_replicas)],
        dict.fromkeys((tuple(grouped), tuple(reversed(grouped)))),
    ):
        yield UnitLine(
            tables, size, order, take_turns=take_turns, hides_sums=hides_sums, starts=starts
        )


def show_lines(*judges: DraftJudge, starts: Sequence[int] | None = None) -> None:
    """Shows judges the divisions that may be better than their best plans, within their budgets.

    Args:
        judges: with the same tables.
        starts: see :class:`UnitLine`.
    """
    for line in _lines(judges[0].tables, starts):
        drafts = [*line.drafts()]
        for judge in judges:
            for least_s, draft in judge.promising(drafts, judge.best_s):
                if least_s < judge.best_s and not judge.is_spent:
                    judge.step_s(draft, math.inf)
