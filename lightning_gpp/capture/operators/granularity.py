"""How coarse the operators of a large model are: its repeated blocks in a few pieces each.

A planner has nothing to choose inside of an attention, and a deep transformer has thousands of
calls. A module *repeats* where a container holds several of its class (``h.0``, ``h.1``, …).
In a graph of many operators these become one:

- what runs inside one call of a child of the innermost repeated module (``h.3.attn``);
- outside of repeated modules, what runs inside one call of a module without sub-modules;
- what a repeated module computes itself (the residual addition) and the child whose result only it
  reads, if it waits for nothing that the child does not wait for: then no branch is delayed.

If there still are very many, whole repeated modules become one, innermost first. A call is known
by its number, not by its name alone: two calls of one module have others in between. A group that
would wait for itself (a path leaves it and comes back) is taken apart again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn

from lightning_gpp.capture.operators.grouping import NodeGroups, find_cycle
from lightning_gpp.capture.operators.normalize import observation
from lightning_gpp.capture.tracing.trace import Call, Names

FEW = 64
"""Graphs of up to so many operators stay as they are; branches inside small blocks may matter."""
MANY = 400
"""With more operators, whole repeated modules become operators."""
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class Group:
    """The nodes of one operator.

    Attributes:
        nodes: in running order.
        call: the call of a module that they are, if they were joined for that.
    """

    nodes: tuple[fx.Node, ...]
    call: Call | None = None


def coarsen(groups: Sequence[tuple[fx.Node, ...]], module: nn.Module) -> list[Group]:
    """The operators that a planner sees, in topological order.

    Args:
        groups: the smallest possible operators, in topological order.
        module: the captured module.
    """
    result = [Group(nodes) for nodes in groups]
    if len(groups) <= FEW:
        return result
    places = _Places(module)
    graph = _Graph(groups)
    for level in range(places.max_depth(graph.calls) + 1, 0, -1):
        result = _joined(graph, places, level)
        if len(result) <= MANY:
            break
    return result


class _Places:
    """Where in the tree of module calls something runs."""

    def __init__(self, module: nn.Module) -> None:
        names = Names.of(module)
        self.with_children = {
            name for name, item in module.named_modules() if next(item.children(), None) is not None
        }
        self.repeated = {
            names.modules[id(item)]
            for container in module.modules()
            if isinstance(container, _CONTAINERS)
            for item in container.children()
            if [type(each) for each in container.children()].count(type(item)) > 1
        } & self.with_children

    def max_depth(self, stacks: Sequence[tuple[Call, ...]]) -> int:
        """How deep repeated modules run inside of each other."""
        return max((len(self._blocks(calls)) for calls in stacks), default=0)

    def block(self, calls: Sequence[Call]) -> Call | None:
        """The innermost call of a repeated module."""
        return next((call for call in reversed(calls) if call.name in self.repeated), None)

    def unit(self, calls: Sequence[Call], level: int) -> Call | None:
        """The call to which something that runs inside of ``calls`` belongs; None: to none.

        Args:
            calls: outermost first.
            level: repeated modules inside of ``level - 1`` others become units as a whole.
        """
        blocks = self._blocks(calls)
        if len(blocks) >= level:
            return calls[blocks[level - 1]]
        if blocks:
            inside = calls[blocks[-1] + 1 :]
            return inside[0] if inside else None
        return calls[-1] if calls and calls[-1].name not in {"", *self.with_children} else None

    def _blocks(self, calls: Sequence[Call]) -> list[int]:
        return [i for i, call in enumerate(calls) if call.name in self.repeated]


class _Graph:
    """The smallest operators, numbered in topological order, and what they read."""

    def __init__(self, groups: Sequence[tuple[fx.Node, ...]]) -> None:
        self.groups = groups
        number = {node: i for i, nodes in enumerate(groups) for node in nodes}
        self.reads = [
            {number[arg] for node in nodes for arg in node.all_input_nodes if arg in number} - {i}
            for i, nodes in enumerate(groups)
        ]
        self.readers: list[set[int]] = [set() for _ in groups]
        for i, others in enumerate(self.reads):
            for other in others:
                self.readers[other].add(i)
        producers = [_producer(nodes) for nodes in groups]
        self.is_module = [node.op == "call_module" for node in producers]
        self.calls = [_stack(node) for node in producers]


def _producer(nodes: Sequence[fx.Node]) -> fx.Node:
    """The first node that makes a tensor; look-ups on it may run in later calls."""
    return next((node for node in nodes if observation(node).has_tensors), nodes[0])


def _stack(node: fx.Node) -> tuple[Call, ...]:
    """The calls around a node, without those of modules that were made on the spot."""
    calls: list[Call] = []
    for call in node.meta.get("calls", ()):
        if not calls or calls[-1].name != call.name:
            calls.append(call)
    return tuple(calls)


def _joined(graph: _Graph, places: _Places, level: int) -> list[Group]:
    """The operators where ``level`` says which repeated modules become one."""
    units = _units(graph, places, level)
    while True:
        partition = NodeGroups([node for nodes in graph.groups for node in nodes])
        for nodes in graph.groups:
            partition.join(nodes)
        for members in units.values():
            partition.join(graph.groups[i][0] for i in members)
        widest = _widest_in_cycle(partition, graph, units)
        if widest is None:
            return _named(partition, graph, units)
        units |= {member: [member] for member in units.pop(widest)}


_Units = dict["Call | int", list[int]]
"""A call, or the number of an operator that stands for itself -> the operators in it."""


def _units(graph: _Graph, places: _Places, level: int) -> _Units:
    units: _Units = {}
    unit_of: dict[int, Call | int] = {}
    for i, calls in enumerate(graph.calls):
        key: Call | int | None = places.unit(calls, level)
        if key is None and not graph.is_module[i]:
            key = _followed(graph, places, units, unit_of, i)
        unit_of[i] = i if key is None else key
        units.setdefault(unit_of[i], []).append(i)
    return units


def _followed(
    graph: _Graph, places: _Places, units: _Units, unit_of: Mapping[int, Call | int], i: int
) -> Call | int | None:
    """The unit that an operator of a repeated module may join without delaying any other."""
    block = places.block(graph.calls[i])
    read = [other for other in graph.reads[i] if places.block(graph.calls[other]) == block]
    if block is None or not read or graph.readers[max(read)] != {i}:
        return None
    key = unit_of[max(read)]
    members = frozenset(units[key])
    needed, stack = set(members), list(members)
    while stack:
        current = stack.pop()
        if current in members or places.block(graph.calls[current]) == block:
            fresh = graph.reads[current] - needed
            needed |= fresh
            stack += fresh
    return key if graph.reads[i] <= needed else None


def _widest_in_cycle(partition: NodeGroups, graph: _Graph, units: _Units) -> Call | int | None:
    """Of the units that wait for each other somewhere the widest; None if none does."""
    by_root = {partition.find(graph.groups[units[key][0]][0]): key for key in units}
    keys = [by_root[root] for root in find_cycle(partition.predecessors())]
    joined = [key for key in keys if len(units[key]) > 1]
    return max(joined, key=lambda key: units[key][-1] - units[key][0], default=None)


def _named(partition: NodeGroups, graph: _Graph, units: _Units) -> list[Group]:
    call_of = {
        partition.find(graph.groups[members[0]][0]): key
        for key, members in units.items()
        if isinstance(key, Call) and len(members) > 1
    }
    return [Group(nodes, call_of.get(partition.find(nodes[0]))) for nodes in partition.ordered()]
