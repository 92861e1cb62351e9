"""The model graph as planners cut it: *units* of operators that stay together.

Operators that change the same module state (the running statistics of one BatchNorm that is
called twice) must be in one stage, and with them everything between them, or the stage would not
be convex. Contracting them first lets the rest of a planner move single units freely.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from lightning_gpp.common.graph_order import find_cycle, topological_order
from lightning_gpp.cost import Profile
from lightning_gpp.graph import ModelGraph


@dataclass(frozen=True)
class UnitGraph:
    """Units in topological order, with what flows between them.

    Attributes:
        operators: operator names of each unit, in topological order.
        compute_s: seconds of forward and backward of each unit for one micro-batch.
        predecessors: units whose values a unit reads, ascending.
        finals: units that may come last: they make an output and nobody reads from them.
    """

    operators: tuple[tuple[str, ...], ...]
    compute_s: tuple[float, ...]
    predecessors: tuple[tuple[int, ...], ...]
    finals: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.operators)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """Units that read a unit's values, ascending."""
        found: list[list[int]] = [[] for _ in self.operators]
        for unit, sources in enumerate(self.predecessors):
            for source in sources:
                found[source].append(unit)
        return tuple(map(tuple, found))


def num_separable(graph: ModelGraph) -> int:
    """Parts that can be on devices of their own: the most devices that the graph can use."""
    return len(set(indivisible_groups(graph).values()))


def indivisible_groups(graph: ModelGraph) -> dict[str, int]:
    """Operator -> group of operators that must be in one stage; most are alone.

    Beside operators with common state, an output-making operator is joined with everything that
    depends on it where otherwise no stage with an output could be the last one.
    """
    groups = {operator.name: index for index, operator in enumerate(graph)}
    for holders in state_holders(graph).values():
        if len(holders) > 1:
            groups = _merged(groups, holders)
    groups = _without_cycles(graph, groups)
    if not _final_groups(graph, groups) and (tail := _output_tail(graph)):
        groups = _without_cycles(graph, _merged(groups, tail))
    return groups


def build_units(graph: ModelGraph, profile: Profile, groups: Mapping[str, int]) -> UnitGraph:
    """Contracts groups of operators to units.

    Args:
        graph: the model.
        profile: what its operators cost.
        groups: operator name -> its group; the graph of the groups has no cycle.
    """
    members: dict[int, list[str]] = {}
    for operator in graph:
        members.setdefault(groups[operator.name], []).append(operator.name)
    order = topological_order(group_successors(graph, groups))
    operators = tuple(tuple(members[group]) for group in order)
    unit_of = {name: unit for unit, names in enumerate(operators) for name in names}
    costs = profile.operators
    return UnitGraph(
        operators=operators,
        compute_s=tuple(
            sum(costs[name].forward_s + costs[name].backward_s for name in names)
            for names in operators
        ),
        predecessors=tuple(
            tuple(sorted({unit_of[p] for name in names for p in graph.predecessors[name]} - {unit}))
            for unit, names in enumerate(operators)
        ),
        finals=tuple(sorted(_final_groups(graph, unit_of))) or (len(operators) - 1,),
    )


def state_holders(graph: ModelGraph) -> dict[str, list[str]]:
    """State name -> the operators that change it."""
    holders: dict[str, list[str]] = {}
    for operator in graph:
        for name in operator.state:
            holders.setdefault(name, []).append(operator.name)
    return holders


def output_makers(graph: ModelGraph) -> list[str]:
    """The operators that produce what the model returns."""
    return list(dict.fromkeys(graph.producer[n] for n in graph.outputs if n in graph.producer))


def _merged(groups: Mapping[str, int], members: Iterable[str]) -> dict[str, int]:
    ids = {groups[name] for name in members}
    return {name: min(ids) if group in ids else group for name, group in groups.items()}


def _without_cycles(graph: ModelGraph, groups: dict[str, int]) -> dict[str, int]:
    while cycle := set(find_cycle(group_successors(graph, groups))):
        groups = {name: min(cycle) if group in cycle else group for name, group in groups.items()}
    return groups


def _final_groups(graph: ModelGraph, groups: Mapping[str, int]) -> set[int]:
    """The groups that make an output and that nobody reads from."""
    successors = group_successors(graph, groups)
    return {groups[name] for name in output_makers(graph) if not successors[groups[name]]}


def _output_tail(graph: ModelGraph) -> list[str]:
    """The smallest set of an output-making operator and everything that depends on it."""
    tails = []
    for maker in output_makers(graph):
        tail = {maker}
        for operator in graph:
            if tail.intersection(graph.predecessors[operator.name]):
                tail.add(operator.name)
        tails.append(sorted(tail))
    return min(tails, key=len, default=[])


def order_to_end(successors: Mapping[int, set[int]], ends: Iterable[int]) -> list[int] | None:
    """The order of :func:`topological_order` with one of some nodes last, the largest that can be.

    Args:
        successors: node -> its successors.
        ends: nodes that may be last, if they have no successors.

    Returns:
        None where there is a cycle, or no node can be last.

    >>> order_to_end({0: {1}, 1: set(), 2: set()}, ends=[0, 1])
    [0, 2, 1]
    """
    last = max((node for node in ends if not successors[node]), default=None)
    if last is None:
        return None
    order = topological_order(
        {
            node: targets if node == last else targets | {last}
            for node, targets in successors.items()
        }
    )
    return order if len(order) == len(successors) else None


def group_successors(graph: ModelGraph, groups: Mapping[str, int]) -> dict[int, set[int]]:
    """Group of operators -> other groups that read from it.

    Args:
        graph: the model.
        groups: operator name -> its group, for all operators.
    """
    found: dict[int, set[int]] = {group: set() for group in groups.values()}
    for name, targets in graph.successors.items():
        found[groups[name]] |= {groups[target] for target in targets} - {groups[name]}
    return found
