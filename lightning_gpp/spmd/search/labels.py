"""A* over what is there in which placements, from one step to another.

A *label* is a way to have come so far: its seconds, what it leaves in memory, and the placements of
all live values. Two observations keep them few:

- *Conversions can wait.* A label that could be turned into another one by conversions, without
  becoming more expensive than it, makes the other one superfluous: whatever follows can start with
  these conversions. So conversions are only made where a rule reads their result.
- *A lower bound*: every step still to come takes at least what its cheapest rule takes, with
  everything that only this step reads (A*, Hart, Nilsson and Raphael 1968). It is consistent: it
  falls along a transition by no more than the transition costs.

Memory is a second cost, per class of equal devices: a label is superfluous only if another one is
nowhere behind (multi-criteria labels, Martins 1984), and one that cannot fit any more is dropped.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_gpp.spmd.search.steps import PricedRule, SearchStep
from lightning_gpp.spmd.search.value_table import Memory, Obtained, ValueTable, plus

State = tuple[int, ...]
"""Placements, as bits, of the live values."""

_FIRST_LABELS = 16
"""At a position, before its arrays grow."""

TOLERANCE = 1e-12
"""Relative; two sums of the same prices in another order are equal."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a label did at a step, without names: the same in every equal block.

    Attributes:
        rule: index of the rule taken.
        ways: for live values that had to begin or to be converted: index among the rule's reads,
            and how.
    """

    rule: int
    ways: tuple[tuple[int, Obtained], ...]


@dataclass(slots=True, eq=False)
class Label:
    """A way to have come so far.

    Attributes:
        seconds: since the first step.
        memory: bytes left since then, per class of devices.
        position: the next step.
        state: of the values that are live there.
        before: the label that it continues; None at the beginning.
        choice: what it did last; a sequence of choices where a whole block was done.
    """

    seconds: float
    memory: Memory
    position: int
    state: State
    before: Label | None = None
    choice: tuple[Choice, ...] = ()

    def choices(self) -> list[Choice]:
        """All choices since the beginning."""
        found: list[tuple[Choice, ...]] = []
        label: Label | None = self
        while label is not None:
            found.append(label.choice)
            label = label.before
        return [choice for part in reversed(found) for choice in part]


class TooManyLabelsError(Exception):
    """A position has more labels than may be, of which none is to be dropped."""


class TooManyExpansionsError(RuntimeError):
    """The search was ended by its limit."""


@dataclass
class Effort:
    """How much was searched.

    Attributes:
        most: expansions after which a search gives up.
        expansions: labels that were continued.
        made: labels that were made.
        most_labels: at one position.
        drops_labels: whether what comes after as many is dropped; otherwise the search gives up.
        dropped: labels that were.
    """

    most: int
    expansions: int = 0
    made: int = 0
    most_labels: int | None = None
    drops_labels: bool = True
    dropped: int = 0

    def is_full(self, labels: int) -> bool:
        """Whether a position with so many labels takes no more.

        Raises:
            TooManyLabelsError: it does not, and nothing is to be dropped.
        """
        if labels != self.most_labels:
            return False
        if not self.drops_labels:
            raise TooManyLabelsError
        self.dropped += 1
        return True

    def count(self) -> None:
        """One more expansion.

        Raises:
            TooManyExpansionsError: there were as many as may be.
        """
        self.expansions += 1
        if self.expansions > self.most:
            raise TooManyExpansionsError


@dataclass
class _Compiled:
    """A step as the inner loop wants it."""

    rules: tuple[tuple[PricedRule, tuple[tuple[int, int, ValueTable, bool], ...]], ...]
    kept: tuple[int, ...]
    tables: tuple[ValueTable, ...]


class LabelSearch:
    """Labels over a sequence of steps.

    Args:
        steps: all steps.
        tables: of every value.
        effort: counts expansions.
        memory_limit: most bytes per class of devices; None without limits.
    """

    def __init__(
        self,
        steps: Sequence[SearchStep],
        tables: Mapping[str, ValueTable],
        effort: Effort,
        memory_limit: Memory | None = None,
    ) -> None:
        self.steps = steps
        self.effort = effort
        self._limit = memory_limit
        self._compiled = [self._compile(step, tables) for step in steps]
        least = (step.least_s for step in reversed(steps))
        self.remaining_s = [*itertools.accumulate(least, initial=0.0)][::-1]
        none = () if memory_limit is None else (0.0,) * len(memory_limit)
        self._remaining_memory = [none]
        if memory_limit is not None:
            for step in reversed(steps):
                self._remaining_memory.append(plus(self._remaining_memory[-1], step.least_memory))
            self._remaining_memory.reverse()

    def _compile(self, step: SearchStep, tables: Mapping[str, ValueTable]) -> _Compiled:
        place_of = {name: place for place, name in enumerate(step.live)}
        rules = tuple(
            (
                rule,
                tuple(
                    (place_of[name], place, tables[name], name not in step.live_after)
                    for name, place in rule.reads
                ),
            )
            for rule in step.rules
        )
        kept = tuple(place_of[name] for name in step.live_after if name in place_of)
        return _Compiled(rules, kept, tuple(tables[name] for name in step.live))

    def tables_at(self, position: int) -> tuple[ValueTable, ...]:
        """Tables of the values that are live before a step; none after the last one."""
        return self._compiled[position].tables if position < len(self.steps) else ()

    def signature(self, position: int) -> Hashable:
        """What a step does, whatever its names: equal ones have equal labels."""
        compiled = self._compiled[position]
        return (
            tuple(
                (
                    rule.seconds,
                    rule.memory,
                    rule.makes,
                    tuple((index, place, id(table), last) for index, place, table, last in reads),
                )
                for rule, reads in compiled.rules
            ),
            compiled.kept,
            tuple(map(id, compiled.tables)),
        )

    def successors(self, label: Label) -> list[Label]:
        """All labels that one step leads to."""
        compiled = self._compiled[label.position]
        found = []
        for number, (rule, reads) in enumerate(compiled.rules):
            partial: list[tuple[float, Memory, State, tuple[tuple[int, Obtained], ...]]] = [
                (label.seconds + rule.seconds, plus(label.memory, rule.memory), label.state, ())
            ]
            for read, (index, place, table, is_last) in enumerate(reads):
                if len(partial) == 1 and partial[0][2][index] >> place & 1:
                    continue
                partial = [
                    (
                        seconds + way.seconds,
                        plus(memory, way.memory),
                        (*state[:index], way.placements, *state[index + 1 :]),
                        (*ways, (read, way)) if way.path or not state[index] else ways,
                    )
                    for seconds, memory, state, ways in partial
                    for way in table.ways(state[index], place, is_last)
                ]
            for seconds, memory, state, ways in partial:
                after = (*(state[place] for place in compiled.kept), *rule.makes)
                found.append(
                    Label(
                        seconds,
                        memory,
                        label.position + 1,
                        after,
                        label,
                        (Choice(number, ways),),
                    )
                )
        return found

    def fits(self, label: Label) -> bool:
        """Whether the memory may still be enough."""
        if self._limit is None:
            return True
        least = self._remaining_memory[label.position]
        return all(
            used + more <= most * (1 + TOLERANCE)
            for used, more, most in zip(label.memory, least, self._limit)
        )

    def explore(
        self,
        start: Label,
        end: int,
        *,
        is_goal: bool,
        successors: Callable[[Label], list[Label]] | None = None,
    ) -> list[Label]:
        """Labels at a position that no other makes superfluous, cheapest first.

        Args:
            start: where to begin.
            end: the position to reach.
            is_goal: whether the cheapest one is enough, and the whole memory is to fit.
            successors: of a label; those of one step if not given.

        Raises:
            TooManyExpansionsError: the effort's limit ended it.
        """
        height = 1 + len(start.memory)
        settled = [
            Settled(self.tables_at(position), height) for position in range(start.position, end + 1)
        ]
        number = itertools.count()
        base_s = self.remaining_s[end]
        heap = [(start.seconds + self.remaining_s[start.position] - base_s, 0, 0, start)]
        while heap:
            _, _, _, label = heapq.heappop(heap)
            place = settled[label.position - start.position]
            if place.has(label):
                continue
            if label.position != end and self.effort.is_full(len(place.labels)):
                continue
            place.add(label)
            if label.position == end:
                if is_goal:
                    return [label]
                continue
            self.effort.count()
            for after in (successors or self.successors)(label):
                if is_goal and not self.fits(after):
                    continue
                if not settled[after.position - start.position].is_new(after):
                    continue
                self.effort.made += 1
                bound_s = after.seconds + self.remaining_s[after.position] - base_s
                heapq.heappush(heap, (bound_s, -after.position, next(number), after))
        return settled[-1].labels


class Settled:
    """Labels at a position, none of which makes another one superfluous when it is added.

    All are compared at once: costs of labels in columns, and what it takes to lift each live value
    of each to the wanted placements (:meth:`ValueTable.lifts`) added to them.

    Args:
        tables: of the values that are live there.
        num_costs: seconds, and bytes of every class of devices.
    """

    def __init__(self, tables: tuple[ValueTable, ...], num_costs: int) -> None:
        self._tables = tables
        self.labels: list[Label] = []
        self._least: dict[tuple[State, Memory], float] = {}
        self._costs = np.empty((num_costs, _FIRST_LABELS))
        self._states = np.empty((len(tables), _FIRST_LABELS), dtype=np.intp)

    def is_new(self, label: Label) -> bool:
        """Whether none with its state and memory was asked about that was as fast."""
        key = label.state, label.memory
        if self._least.get(key, math.inf) <= label.seconds * (1 + TOLERANCE):
            return False
        self._least[key] = label.seconds
        return True

    def add(self, label: Label) -> None:
        """Adds a label."""
        count = len(self.labels)
        if count == self._costs.shape[1]:  # room for twice as many
            self._costs = np.hstack([self._costs, self._costs])
            self._states = np.hstack([self._states, self._states])
        self._costs[:, count] = (label.seconds, *label.memory)
        self._states[:, count] = [t.number(has) for t, has in zip(self._tables, label.state)]
        self.labels.append(label)

    def has(self, label: Label) -> bool:
        """Whether a label is superfluous."""
        count = len(self.labels)
        if not count:
            return False
        if self._least.get((label.state, label.memory), math.inf) < label.seconds:
            return True  # a faster one was made since, which came before it
        costs = self._costs[:, :count]
        for table, numbers, wanted in zip(self._tables, self._states[:, :count], label.state):
            costs = costs + table.lifts(wanted).take(numbers, axis=1)
        if not label.memory or costs[0].min() > label.seconds * (1 + TOLERANCE):
            return bool(costs[0].min() <= label.seconds * (1 + TOLERANCE))
        limits = np.array((label.seconds, *label.memory)) * (1 + TOLERANCE)
        return bool((costs <= limits[:, None]).all(axis=0).any())
