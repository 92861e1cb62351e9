"""A plan as the search changes it: sets of units on groups of devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from lightning_gpp.common.cached_method import cached_method
from lightning_gpp.graph import FEED
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.units import (
    UnitGraph,
    build_units,
    indivisible_groups,
    order_to_end,
    output_makers,
)


class DraftStage(NamedTuple):
    """A stage of a draft.

    Attributes:
        units: the units that it holds.
        devices: one per replica.
        multiple: smallest micro-batches that all its replicas together take at a time.
        recompute: whether it runs its forward again.
        shares: of unequal replicas, as those of a :class:`~lightning_gpp.planner.plan.plan.Stage`.
    """

    units: Units
    devices: tuple[int, ...]
    multiple: int = 1
    recompute: bool = False
    shares: tuple[int, ...] = ()

    @property
    def num_replicas(self) -> int:
        """Replicas of the stage."""
        return len(self.devices)


class Draft(NamedTuple):
    """Stages in topological order.

    Attributes:
        stages: the stages; the last one computes the loss.
        num_microbatches: smallest micro-batches of a mini-batch.
        order_pace: as that of a :class:`~lightning_gpp.planner.plan.plan.Plan`.
    """

    stages: tuple[DraftStage, ...]
    num_microbatches: int
    order_pace: float | None = None

    @property
    def num_devices(self) -> int:
        """Devices with a stage or a replica of one."""
        return len({device for stage in self.stages for device in stage.devices})

    @property
    def num_actions(self) -> int:
        """Forwards and backwards of all replicas."""
        count = self.num_microbatches
        return sum(2 * one.num_replicas * count // one.multiple for one in self.stages)

    def with_stage(self, number: int, *stages: DraftStage) -> Draft:
        """The draft with others in the place of one stage; perhaps none, and not in order."""
        before, after = self.stages[:number], self.stages[number + 1 :]
        return self._replace(stages=(*before, *stages, *after))

    def reduced(self) -> Draft:
        """The same with as few smallest micro-batches as are needed.

        >>> Draft((DraftStage(1, (0,), 4), DraftStage(2, (0, 1), 8)), 16).reduced()
        Draft(stages=(DraftStage(units=1, devices=(0,), multiple=1, recompute=False, shares=()), \
DraftStage(units=2, devices=(0, 1), multiple=2, recompute=False, shares=())), num_microbatches=4, \
order_pace=None)
        """
        spare = (math.gcd(*one.shares) or one.multiple // len(one.devices) for one in self.stages)
        most = math.gcd(self.num_microbatches, *spare)
        return self if most == 1 else self._counted(lambda count: count // most)

    def scaled(self, factor: int) -> Draft:
        """The same with smallest micro-batches of which ``factor`` make one of today."""
        return self._counted(lambda count: count * factor)

    def _counted(self, changed: Callable[[int], int]) -> Draft:
        """The same with other numbers of smallest micro-batches everywhere."""
        stages = [
            one._replace(multiple=changed(one.multiple), shares=tuple(map(changed, one.shares)))
            for one in self.stages
        ]
        count = changed(self.num_microbatches)
        return self._replace(stages=tuple(stages), num_microbatches=count)


def draft_of(plan: Plan, tables: UnitTables) -> Draft | None:
    """The draft of a plan, without the order of a chain; None where a stage divides a unit."""
    stages = []
    for one in plan.stages:
        units = tables.units_of(one.operators)
        taken = one.devices, one.microbatch_multiple, one.recompute, one.shares
        stages.append(DraftStage(units, *taken))
    if sum(stage.units for stage in stages) != tables.everything:
        return None
    assert plan.num_microbatches is not None  # planners say so
    return Draft(tuple(stages), plan.num_microbatches, plan.order_pace).reduced()


def plan_of(draft: Draft, tables: UnitTables, name: str, *, is_chain: bool = False) -> Plan:
    """The plan of a draft whose stages are in topological order.

    Args:
        draft: the draft.
        tables: of its units.
        name: of the planner.
        is_chain: whether every stage waits for the one before it.
    """
    stages = tuple(
        Stage(number, tables.operators(stage.units), *stage[1:])
        for number, stage in enumerate(draft.stages)
    )
    return Plan(stages, name, draft.num_microbatches, is_chain, draft.order_pace)


def arranged(stages: Sequence[DraftStage], tables: UnitTables) -> tuple[DraftStage, ...] | None:
    """The stages in topological order, as close to the given one as can be.

    The last one makes an output of the model, and nobody reads from it.

    Args:
        stages: stages that hold all units, in any order.
        tables: of their units.

    Returns:
        None where stages wait for each other in a circle, or none can be last.
    """
    sources = [tables.sources(stage.units) for stage in stages]
    makers = tables.makers
    if (stages[-1].units & makers or not makers) and _are_in_order(stages, sources):
        return tuple(stages)
    users: dict[int, set[int]] = {number: set() for number in range(len(stages))}
    for target, needed in enumerate(sources):
        for source, stage in enumerate(stages):
            if stage.units & needed:
                users[source].add(target)
    ends = (number for number in users if stages[number].units & makers or not makers)
    order = order_to_end(users, ends)
    return None if order is None else tuple([stages[number] for number in order])


def _are_in_order(stages: Sequence[DraftStage], sources: Sequence[Units]) -> bool:
    """Whether none comes before one that it reads from: most moves leave it at that."""
    behind = 0
    for stage, needed in zip(reversed(stages), reversed(sources)):
        if needed & behind:
            return False
        behind |= stage.units
    return True


Units = int
"""A set of units: bit ``i`` is the unit at place ``i`` of the depth-first order."""


class Crossing(NamedTuple):
    """The values that cross from one set of units to another.

    Attributes:
        values: names of the values; none: nothing.
        has_backward: whether gradients come back.
        is_cuttable: whether all of them can be cut by samples.
    """

    values: tuple[str, ...]
    has_backward: bool
    is_cuttable: bool


class UnitTables:
    """Facts about sets of units, each computed once.

    Args:
        request: the question.

    Attributes:
        request: the question.
        units: the units in the order of the model.
        order: the unit at every place, depth first, one with an output last.
        num_units: how many there are.
        model_order: their places in the order of the model.
        devices_of: kind -> all devices of it.
        everything: all units.
        makers: units that make an output of the model.
        fed: units that read an input of the model.
        compute_s: seconds of every unit on the first device, for the largest micro-batch.
        made: place (or feed) -> the values made there, the units that read them, and whether the
            model returns them.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        graph = request.graph
        profile = request.profile(request.microbatch_sizes[-1])
        units = build_units(graph, profile, indivisible_groups(graph))
        order = tuple(depth_first(_with_ends(units), units.compute_s))
        self.units, self.order = units, order
        place = {unit: at for at, unit in enumerate(order)}
        self.num_units = len(order)
        self.model_order = [place[unit] for unit in range(len(order))]
        self.devices_of: dict[str, list[int]] = {}
        for number, device in enumerate(request.cluster.devices):
            self.devices_of.setdefault(device.kind, []).append(number)
        self.everything: Units = (1 << len(order)) - 1
        self.compute_s = [units.compute_s[unit] for unit in order]
        self._place_of = {
            name: place[unit] for unit, names in enumerate(units.operators) for name in names
        }
        self.needs = [sum(1 << place[p] for p in units.predecessors[unit]) for unit in order]
        self.makers: Units = self.units_of(output_makers(graph))
        self._ordered = [operator.name for operator in graph]
        self._numbers_at: list[list[int]] = [[] for _ in order]
        for number, name in enumerate(self._ordered):
            self._numbers_at[self._place_of[name]].append(number)
        self.made = self._values_made()
        self._stateful: Units = self.units_of(op.name for op in graph if op.state)
        fed = [reader for _, producer, reader in graph.reads if producer is None]
        self.fed: Units = self.units_of(fed)
        self._readers = {name: self.units_of(ops) for name, ops in graph.readers.items()}

    @cached_method
    def each_s(self, size: float, kind: str) -> list[float]:
        """Seconds of every unit for a micro-batch of some samples on a kind of device."""
        costs, found = self.request.profile(size, kind).operators, [0.0] * self.num_units
        for name, place in self._place_of.items():
            found[place] += costs[name].forward_s + costs[name].backward_s
        return found

    def units_of(self, operators: Iterable[str]) -> Units:
        """The units that have some of these operators."""
        found = 0
        for name in operators:
            found |= 1 << self._place_of[name]
        return found

    @cached_method
    def operators(self, units: Units) -> tuple[str, ...]:
        """Operators in the order of the model."""
        numbers = sorted([number for at in places(units) for number in self._numbers_at[at]])
        return tuple([self._ordered[number] for number in numbers])

    @cached_method
    def seconds(self, units: Units) -> float:
        """Seconds of some units, as those of :attr:`compute_s`."""
        return sum([self.compute_s[at] for at in places(units)])

    @cached_method
    def sources(self, units: Units) -> Units:
        """Other units that some units read from."""
        found = 0
        for at in places(units):
            found |= self.needs[at]
        return found & ~units

    def has_state(self, units: Units) -> bool:
        """Whether a forward of them changes something, so that there can be no second one."""
        return bool(units & self._stateful)

    @cached_method
    def carried(self, source: Units, target: Units, *, takes_outputs: bool) -> Crossing:
        """What goes from one set to another.

        Args:
            source: units, or none: the feed.
            target: units, perhaps none.
            takes_outputs: whether the outputs of the model go there, too.
        """
        graph = self.request.graph
        names = [
            name
            for at in (places(source) if source else (FEED,))
            for name, readers, is_output in self.made.get(at, ())
            if readers & target or (is_output and takes_outputs)
        ]
        return Crossing(
            tuple(names),
            not graph.with_gradient.isdisjoint(names),
            all(graph.values[name].is_cuttable for name in names),
        )

    @cached_method
    def own_parameters(self, units: Units) -> tuple[str, ...]:
        """Parameters that nobody else reads."""
        return tuple([name for name, readers in self._readers.items() if not readers & ~units])

    def _values_made(self) -> dict[int, list[tuple[str, Units, bool]]]:
        """Place (or feed) -> the values made there, with who reads them elsewhere."""
        graph = self.request.graph
        readers: dict[str, Units] = {}
        for name, _, reader in graph.reads:
            readers[name] = readers.get(name, 0) | 1 << self._place_of[reader]
        found: dict[int, list[tuple[str, Units, bool]]] = {}
        for name in graph.values:
            producer = graph.producer.get(name)
            at = FEED if producer is None else self._place_of[producer]
            is_output = name in graph.outputs
            if name in readers or is_output:
                found.setdefault(at, []).append((name, readers.get(name, 0), is_output))
        return found


def _with_ends(units: UnitGraph) -> list[tuple[int, ...]]:
    """Predecessors, where one unit with an output comes after all others that nobody reads."""
    predecessors = list(units.predecessors)
    last = units.finals[-1]
    ends = [unit for unit, users in enumerate(units.successors) if not users and unit != last]
    predecessors[last] = tuple(sorted({*predecessors[last], *ends}))
    return predecessors


@lru_cache(maxsize=65536)
def places(units: Units) -> tuple[int, ...]:
    """The places of some units, ascending.

    >>> places(0b1011)
    (0, 1, 3)
    """
    found = []
    while units:
        low = units & -units
        found.append(low.bit_length() - 1)
        units ^= low
    return tuple(found)


def depth_first(predecessors: Sequence[Sequence[int]], seconds: Sequence[float]) -> list[int]:
    """A topological order that follows a branch to its end before it begins the next one.

    Those with the longest way to the end of the model come first.

    Args:
        predecessors: of every unit.
        seconds: likewise.

    .. code-block:: text

        0 ─┬─ 1 ── 3 ─┬─ 5        0 1 3 2 4 5, or where 4 takes longer than 3, 0 2 4 1 3 5
           └─ 2 ── 4 ─┘

    >>> depth_first([[], [0], [0], [1], [2], [3, 4]], [1, 1, 1, 1, 1, 1])
    [0, 1, 3, 2, 4, 5]
    >>> depth_first([[], [0], [0], [1], [2], [3, 4]], [1, 1, 1, 1, 2, 1])
    [0, 2, 4, 1, 3, 5]
    """
    successors: list[list[int]] = [[] for _ in predecessors]
    for unit, sources in enumerate(predecessors):
        for source in sources:
            successors[source].append(unit)
    left_s = list(seconds)
    for unit in reversed(range(len(left_s))):
        left_s[unit] += max((left_s[target] for target in successors[unit]), default=0.0)
    missing = [len(set(sources)) for sources in predecessors]
    order: list[int] = []

    def turn(unit: int) -> tuple[float, int]:
        return left_s[unit], -unit

    stack = sorted((unit for unit, count in enumerate(missing) if not count), key=turn)
    while stack:
        order.append(stack.pop())
        for target in sorted(successors[order[-1]], key=turn):
            missing[target] -= 1
            if not missing[target]:
                stack.append(target)
    return order
