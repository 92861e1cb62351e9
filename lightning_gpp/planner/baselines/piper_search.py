"""Piper's dynamic program over downsets, devices and data-parallel degrees.

Source: Piper (NeurIPS 2021, section 4) and its published code (github msr-fiddle/piper)::

    best(I, k, s) = min over downsets I' of I, t, d of
                        max( best(I', k - t d, s - d), seconds(I - I', t, d, s) )

``best(I, k, s)`` is the slowest stage when the operators of the downset ``I`` are the last stages,
on at most ``k`` devices, with data-parallel degrees that add up to at most ``s``. Time is
``O(downsets^2 k s)`` for each pair of degrees; the arithmetic over all ``I'`` is done by numpy (the
original is compiled). Without tensor parallelism ``k`` and ``s`` count the same thing, and ``k`` is
left out.

The downsets of a graph: sets of operators that hold all readers of their members.

Piper (NeurIPS 2021, section 4) builds pipelines from the back: the last stages together are a
downset, and a stage is the difference of two. A chain of ``n`` operators has ``n + 1`` downsets,
``b`` parallel chains have ``(n + 1)^b``: the number explodes with branches, which is the published
limit of that planner.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planner.baselines.piper_costs import Array, DownsetCosts, degree_costs
from lightning_gpp.workloads import PiperInstance

Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class PiperStage:
    """A stage that Piper found.

    Attributes:
        operators: ids, in the order of the instance.
        data_parallel: copies of the stage [d].
        tensor_parallel: devices of each copy [t].
        ways: of every operator the position among its ways by rising time.
    """

    operators: tuple[int, ...]
    data_parallel: int
    tensor_parallel: int
    ways: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PiperPlan:
    """What Piper found.

    Attributes:
        seconds_per_sample: of the slowest stage, Piper's objective.
        stages: in topological order.
    """

    seconds_per_sample: float
    stages: tuple[PiperStage, ...]


@dataclass(frozen=True)
class PiperRules:
    """What may be part of a solution.

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


AS_PUBLISHED = PiperRules()


def search(instance: PiperInstance, rules: PiperRules = AS_PUBLISHED) -> PiperPlan | None:
    """The division with the smallest time per sample; None if nothing fits into memory.

    Raises:
        ValueError: the model has too many downsets, or operators have ways that Piper's knapsack
            cannot choose from.
    """
    return _Search(instance, rules).solve()


class _Search:
    """State of one search: the downsets, the costs, and the table."""

    def __init__(self, instance: PiperInstance, rules: PiperRules) -> None:
        self.instance = instance
        self.rules = rules
        masks = downsets(_readers(instance))
        self.members = _members(masks, len(instance.operators))
        self.max_sum = min(instance.num_samples, instance.num_devices)
        degrees = sorted({t for o in instance.operators for t in o.ways if o.ways[t]})
        self.degrees = [t for t in degrees if t <= instance.num_devices]
        self.counts_devices = self.degrees != [1]
        num_counts = instance.num_devices + 1 if self.counts_devices else 1
        self.best = np.full((len(masks), num_counts, self.max_sum + 1), np.inf)
        self.best[0] = 0.0
        ids = [operator.id for operator in instance.operators]
        single = np.array([float(number in rules.single) for number in ids])
        self.costs = {
            degree: DownsetCosts(
                instance,
                self.members,
                degree_costs(instance, degree),
                max_in_flight=self.max_sum,
                whole_stages=rules.whole_stages,
                single=single,
            )
            for degree in self.degrees
        }
        self.may_be_last = np.ones(len(masks), dtype=bool)
        if rules.last is not None:
            ends = np.array([float(number in rules.last) for number in ids])
            self.may_be_last = self.members @ ends > 0

    def solve(self) -> PiperPlan | None:
        for downset in range(1, len(self.members)):
            self._fill(downset)
        full = len(self.members) - 1
        slowest_s = float(self.best[full, -1, -1])
        if not np.isfinite(slowest_s):
            return None
        return PiperPlan(slowest_s, tuple(self._stages(full)))

    def _fill(self, downset: int) -> None:
        """Sets ``best(I, ., .)`` from all smaller downsets."""
        subs = self._subs(downset)
        if not len(subs):  # it can neither be the last stage nor have one behind it
            return
        table = self.best[downset]
        for degree, copies in self._choices():
            slowest_s = self._slowest_s(downset, subs, degree, copies)
            used = degree * copies if self.counts_devices else 0
            target = table[used:, copies:]
            np.minimum(target, slowest_s.min(axis=0), out=target)
        # "At most" so many devices, and so large a sum.
        np.minimum.accumulate(table, axis=0, out=table)
        np.minimum.accumulate(table, axis=1, out=table)

    def _slowest_s(self, downset: int, subs: Indices, degree: int, copies: int) -> Array:
        """``[sub, k, s]`` of the maximum in the recurrence, k and s from what the stage needs."""
        used = degree * copies if self.counts_devices else 0
        behind = self.best[subs, : self.best.shape[1] - used, : self.max_sum + 1 - copies]
        stage_s = self.costs[degree].seconds(downset, subs, copies)
        sums = np.arange(copies, self.max_sum + 1)
        return np.asarray(np.maximum(behind, stage_s[:, -(-sums // copies)][:, None, :]))

    def _choices(self) -> Iterator[tuple[int, int]]:
        """Tensor-parallel and data-parallel degrees of a stage."""
        for degree in self.degrees:
            for copies in range(1, self.instance.num_devices // degree + 1):
                allowed = self.rules.data_parallel
                if allowed is not None and copies not in allowed:
                    continue
                if copies <= self.max_sum and self.instance.num_samples % copies == 0:
                    yield degree, copies

    def _subs(self, downset: int) -> Indices:
        """Smaller downsets inside of one."""
        outside = 1 - self.members[downset]
        subs = np.flatnonzero(self.members[:downset] @ outside == 0)
        return subs if self.may_be_last[downset] else subs[subs > 0]

    def _stages(self, downset: int) -> Iterator[PiperStage]:
        """The stages behind an entry of the table, first one first."""
        k, s = self.best.shape[1] - 1, self.max_sum
        while downset:
            slowest_s = self.best[downset, k, s]
            while k and self.best[downset, k - 1, s] == slowest_s:
                k -= 1
            while s and self.best[downset, k, s - 1] == slowest_s:
                s -= 1
            sub, degree, copies = self._choice(downset, k, s)
            inside = np.flatnonzero(self.members[downset] - self.members[sub])
            yield PiperStage(
                operators=tuple(self.instance.operators[i].id for i in inside),
                data_parallel=copies,
                tensor_parallel=degree,
                ways=tuple(self.costs[degree].ways(downset, sub, -(-s // copies))),
            )
            k, s = k - (degree * copies if self.counts_devices else 0), s - copies
            downset = sub

    def _choice(self, downset: int, k: int, s: int) -> tuple[int, int, int]:
        """Downset behind the first stage, and its degrees, that give an entry its value."""
        subs = self._subs(downset)
        for degree, copies in self._choices():
            used = degree * copies if self.counts_devices else 0
            if used <= k and copies <= s:
                found = self._slowest_s(downset, subs, degree, copies)[:, k - used, s - copies]
                hits = np.flatnonzero(found == self.best[downset, k, s])
                if len(hits):
                    return int(subs[hits[0]]), degree, copies
        raise AssertionError("an entry of the table has no origin")


def _readers(instance: PiperInstance) -> list[list[int]]:
    place = {operator.id: i for i, operator in enumerate(instance.operators)}
    readers: list[list[int]] = [[] for _ in instance.operators]
    for edge in instance.edges:
        readers[place[edge.source]].append(place[edge.target])
    return readers


def _members(masks: Sequence[int], num_operators: int) -> Array:
    return np.array(
        [[mask >> operator & 1 for operator in range(num_operators)] for mask in masks], dtype=float
    )


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
                f"Piper searches all downsets of the model, and after those of {_size(newest)} of "
                f"its {len(readers)} operators there are {len(found)} already, more than its "
                f"limit of {limit}: their number multiplies with every parallel branch. Use the "
                "planner graphpipe, or fewer and larger operators"
            )
    return found


def _size(masks: Sequence[int]) -> int:
    return masks[0].bit_count() if masks else 0
