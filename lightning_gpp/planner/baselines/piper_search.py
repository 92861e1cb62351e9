"""Piper's dynamic program over downsets, devices and data-parallel degrees.

Source: Piper (NeurIPS 2021, sections 3 and 4) and its published code (github msr-fiddle/piper),
without tensor parallelism, which our plans have not::

    best(I, s) = min over downsets I' of I and d of max( best(I', s - d), seconds(I - I', d, s) )

``best(I, s)`` is the slowest stage when the operators of the downset ``I`` are the last stages,
with data-parallel degrees that add up to at most ``s``. Of a stage of operators ``v`` on ``d``
devices::

    seconds = sum of p_v / d
            + ( sum over edges to and from other stages of 2 c / d
              + sum of 4 (d - 1) w_v / (d N) ) / bandwidth
    memory  = sum of a_v y + b_v,   y = ceil(s / d)

If the fastest ways to run the operators take too much memory, others are chosen by a greedy
knapsack: those that cost the least time per byte saved come first (the published fast heuristic,
which needs at most two ways). Time is ``O(downsets^2 s)`` for each degree; the arithmetic over all
``I'`` is done by numpy (the original is compiled).

The downsets of a graph are the sets of operators that hold all readers of their members: pipelines
are built from the back, and a stage is the difference of two. A chain of ``n`` operators has ``n +
1`` downsets, ``b`` parallel chains have ``(n + 1)^b``: the number explodes with branches, which is
the published limit of that planner.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.workloads.piper import PiperInstance, PiperOperator, Tmpc

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

ENOUGH_BYTES = 1e-9
MAX_WAYS = 2


@dataclass(frozen=True, slots=True)
class PiperStage:
    """A stage of Piper's plan.

    Attributes:
        operators: ids, in the order of the instance.
        data_parallel: copies of the stage [d].
        ways: of every operator the position among its ways by rising time.
    """

    operators: tuple[int, ...]
    data_parallel: int
    ways: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PiperPlan:
    """Piper's plan.

    Attributes:
        seconds_per_sample: of the slowest stage, Piper's objective.
        stages: in topological order.
    """

    seconds_per_sample: float
    stages: tuple[PiperStage, ...]


@dataclass(frozen=True)
class PiperRules:
    """What a plan of Piper may contain.

    Attributes:
        data_parallel: degrees that stages may have; None for all that divide the samples of a
            mini-batch, as published.
        whole_stages: recompute a stage as a whole or not at all (a published option).
        single: ids of operators that neither recompute nor have copies.
        last: ids of operators of which the last stage holds one; None for any.
    """

    data_parallel: Collection[int] | None = None
    whole_stages: bool = False
    single: Collection[int] = ()
    last: Collection[int] | None = None


def search(instance: PiperInstance, rules: PiperRules | None = None) -> PiperPlan | None:
    """The division with the smallest time per sample; None if nothing fits into memory.

    Raises:
        ValueError: the model has too many downsets, or operators have ways that Piper's knapsack
            cannot choose from, or none on a single device.
    """
    return _Search(instance, rules or PiperRules()).solve()


class _Search:
    """State of one search: the downsets, what is between them, and the table."""

    def __init__(self, instance: PiperInstance, rules: PiperRules) -> None:
        self.instance = instance
        ids = [operator.id for operator in instance.operators]
        place = {number: i for i, number in enumerate(ids)}
        pairs = [(place[edge.source], place[edge.target]) for edge in instance.edges]
        readers: list[list[int]] = [[] for _ in ids]
        for source, target in pairs:
            readers[source].append(target)
        masks = downsets(readers)
        rows = [[mask >> operator & 1 for operator in range(len(ids))] for mask in masks]
        self.members = np.array(rows, dtype=float)
        self.max_sum = min(instance.num_samples, instance.num_devices)
        self.copies = [
            copies
            for copies in range(1, self.max_sum + 1)
            if rules.data_parallel is None or copies in rules.data_parallel
            if instance.num_samples % copies == 0
        ]
        self.best = np.full((len(masks), self.max_sum + 1), np.inf)
        self.best[0] = 0.0
        self.may_be_last = np.ones(len(masks), dtype=bool)
        if rules.last is not None:
            ends = np.array([float(number in rules.last) for number in ids])
            self.may_be_last = self.members @ ends > 0
        self.whole_stages = rules.whole_stages
        ways = [_ordered_ways(operator) for operator in instance.operators]
        fast, other = (_Ways([found[place] for found in ways]) for place in (0, -1))
        self.slower_s = other.seconds - fast.seconds
        in_flight = np.arange(self.max_sum + 1)
        self.fast_bytes = fast.memory(in_flight)
        self.small_bytes = np.minimum(self.fast_bytes, other.memory(in_flight))
        self.sent = np.zeros((len(ids), len(ids)))
        for (source, target), edge in zip(pairs, instance.edges):
            self.sent[source, target] = edge.size_bytes
        single = np.array([float(number in rules.single) for number in ids])
        self.sums = {
            "single": self.members @ single,
            "fast_s": self.members @ fast.seconds,
            "slower_s": self.members @ self.slower_s,
            "weights": self.members @ fast.weights,
            "fast_bytes": self.members @ self.fast_bytes,
            "small_bytes": self.members @ self.small_bytes,
            "out": (((1 - self.members) @ self.sent) * self.members).sum(axis=1),
        }

    def solve(self) -> PiperPlan | None:
        for downset in range(1, len(self.members)):
            self._fill(downset)
        slowest_s = float(self.best[-1, -1])
        if not np.isfinite(slowest_s):
            return None
        return PiperPlan(slowest_s, tuple(self._stages(len(self.members) - 1)))

    def _fill(self, downset: int) -> None:
        """Sets ``best(I, .)`` from all smaller downsets."""
        subs, table = self._subs(downset), self.best[downset]
        if len(subs):  # otherwise it can neither be the last stage nor have one behind it
            for copies in self.copies:
                slowest_s = self._slowest_s(downset, subs, copies)
                np.minimum(table[copies:], slowest_s.min(axis=0), out=table[copies:])
            np.minimum.accumulate(table, out=table)  # "at most" so large a sum

    def _slowest_s(self, downset: int, subs: Indices, copies: int) -> Array:
        """``[sub, s]`` of the maximum in the recurrence, s from what the stage needs."""
        behind = self.best[subs, : self.max_sum + 1 - copies]
        sums = np.arange(copies, self.max_sum + 1)
        stage_s = self._seconds(downset, subs, copies)[:, -(-sums // copies)]
        return np.asarray(np.maximum(behind, stage_s))

    def _subs(self, downset: int) -> Indices:
        """Smaller downsets inside of one."""
        outside = 1 - self.members[downset]
        subs = np.flatnonzero(self.members[:downset] @ outside == 0)
        return subs if self.may_be_last[downset] else subs[subs > 0]

    def _stages(self, downset: int) -> Iterator[PiperStage]:
        """The stages behind an entry of the table, first one first."""
        s = self.max_sum
        while downset:
            while s and self.best[downset, s - 1] == self.best[downset, s]:
                s -= 1
            sub, copies = self._choice(downset, s)
            inside = np.flatnonzero(self.members[downset] - self.members[sub])
            ids = tuple(self.instance.operators[i].id for i in inside)
            yield PiperStage(ids, copies, tuple(self._ways(downset, sub, -(-s // copies))))
            s, downset = s - copies, sub

    def _choice(self, downset: int, s: int) -> tuple[int, int]:
        """Downset behind the first stage, and its copies, that give an entry its value."""
        subs = self._subs(downset)
        for copies in self.copies:
            if copies <= s:
                found = self._slowest_s(downset, subs, copies)[:, s - copies]
                hits = np.flatnonzero(found == self.best[downset, s])
                if len(hits):
                    return int(subs[hits[0]]), copies
        raise AssertionError("an entry of the table has no origin")

    def _seconds(self, downset: int, subs: Indices, d: int) -> Array:
        """Seconds per sample of the stages ``downset - sub``: ``[sub, y]``, y from 0."""
        weights = self._between("weights", downset, subs)
        sync_bytes = 4 * (d - 1) * weights / d / self.instance.num_samples
        inside = self.members[downset]
        into = (1 - inside) @ self.sent
        over = into + into  # from before the stage to behind it, at both ends
        cut = inside @ into + self.sums["out"][subs] - self.members[subs] @ over
        bytes_sent = 2 * cut / d + sync_bytes
        result = self._compute_s(downset, subs) / d
        result = result + (bytes_sent / self.instance.bandwidth_bytes_per_s)[:, None]
        if d > 1:
            result[self._between("single", downset, subs) > 0] = np.inf
        return np.asarray(result)

    def _between(self, name: str, downset: int, subs: Indices) -> Array:
        sums = self.sums[name]
        return np.asarray(sums[downset] - sums[subs])

    def _compute_s(self, downset: int, subs: Indices) -> Array:
        """Seconds of compute with ways that fit into memory, infinite where none do."""
        memory_bytes = self.instance.memory_bytes
        fast_s = self._between("fast_s", downset, subs)
        result = np.repeat(fast_s[:, None], self.max_sum + 1, axis=1)
        excess = self._between("fast_bytes", downset, subs) - memory_bytes
        never = self._between("small_bytes", downset, subs) > memory_bytes
        if self.whole_stages:
            never |= (excess > 0) & (self._between("single", downset, subs) > 0)[:, None]
        result[never] = np.inf
        tight = (excess > 0) & np.isfinite(result)
        for in_flight in map(int, np.flatnonzero(tight.any(axis=0))):
            rows = np.flatnonzero(tight[:, in_flight])
            saving = subs[rows], in_flight, excess[rows, in_flight]
            result[rows, in_flight] += self._longer_s(downset, *saving)
        return result

    def _longer_s(self, downset: int, subs: Indices, in_flight: int, excess: Array) -> Array:
        """Seconds that saving the excess bytes costs."""
        if self.whole_stages:
            return self._between("slower_s", downset, subs)
        order, saved = self._by_price(in_flight)
        inside = self.members[downset][order] - self.members[subs][:, order]
        enough = np.cumsum(inside * saved, axis=1) > excess[:, None] - ENOUGH_BYTES
        paid = np.cumsum(inside * self.slower_s[order], axis=1)
        return np.asarray(paid[np.arange(len(subs)), enough.argmax(axis=1)])

    def _by_price(self, in_flight: int) -> tuple[Indices, Array]:
        """Operators whose other way saves memory, cheapest per byte first, and these bytes."""
        saved = (self.fast_bytes - self.small_bytes)[:, in_flight]
        useful = np.flatnonzero(saved > ENOUGH_BYTES)
        order = useful[np.argsort(self.slower_s[useful] / saved[useful], kind="stable")]
        return order, saved[order]

    def _ways(self, downset: int, sub: int, in_flight: int) -> list[int]:
        """Position of the way of every operator of a stage: 0 the fastest, 1 the other one."""
        inside = self.members[downset] - self.members[sub]
        excess = self._between("fast_bytes", downset, np.array([sub]))[0, in_flight]
        excess -= self.instance.memory_bytes
        chosen = np.zeros(len(inside), dtype=int)
        for operator, bytes_saved in zip(*self._by_price(in_flight)):
            if inside[operator] and (excess > ENOUGH_BYTES or (self.whole_stages and chosen.any())):
                chosen[operator] = 1
                excess -= bytes_saved
        return [int(chosen[operator]) for operator in np.flatnonzero(inside)]


class _Ways:
    """One way to run every operator, as arrays in the order of the instance."""

    def __init__(self, ways: Sequence[Tmpc]) -> None:
        self.seconds = np.array([way.seconds_per_sample for way in ways])
        self.weights = np.array([way.parameter_bytes for way in ways], dtype=float)
        self._each = np.array([float(way.memory_bytes_in_flight) for way in ways])
        self._fixed = np.array([float(way.memory_bytes_fixed) for way in ways])

    def memory(self, in_flight: Indices) -> Array:
        """``[operator, samples in flight]``."""
        return np.asarray(self._each[:, None] * in_flight + self._fixed[:, None])


def _ordered_ways(operator: PiperOperator) -> tuple[Tmpc, ...]:
    """The ways to run an operator on one device, the fastest first."""
    ways = tuple(sorted(operator.ways, key=lambda way: way.seconds_per_sample))
    if not 1 <= len(ways) <= MAX_WAYS:
        raise ValueError(
            f"operator {operator.name!r} has {len(ways)} ways to run on 1 devices; Piper's "
            f"knapsack needs at least one and at most {MAX_WAYS}"
        )
    if len({way.parameter_bytes for way in ways}) > 1:
        raise ValueError(
            f"operator {operator.name!r}: ways to run on 1 devices must have the same parameterSize"
        )
    return ways


DOWNSETS_LIMIT = 40_000
"""The limit of the published code (``IDEALS_LIMIT``)."""


def downsets(readers: Sequence[Sequence[int]], limit: int = DOWNSETS_LIMIT) -> list[int]:
    """All downsets as bit masks, smaller ones first.

    Args:
        readers: operator -> operators that read from it.
        limit: how many there may be.

    Raises:
        ValueError: there are more.

    >>> [bin(found) for found in downsets([(1,), (2,), ()])]  # 0 -> 1 -> 2
    ['0b0', '0b100', '0b110', '0b111']
    """
    needs = [sum(1 << reader for reader in found) for found in readers]
    found = [0]
    newest = [0]
    while newest:
        larger = dict.fromkeys(
            downset | 1 << operator
            for downset in newest
            for operator, need in enumerate(needs)
            if not downset >> operator & 1 and not need & ~downset
        )
        found += larger
        newest = list(larger)
        if len(found) > limit:
            raise ValueError(
                "Piper: too many combinations of branches, more than "
                f"{len(found):,} (limit {limit:,}). Use the planner graphpipe"
            )
    return found
