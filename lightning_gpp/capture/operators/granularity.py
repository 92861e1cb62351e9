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

from collections.abc import Sequence

from torch import fx, nn

from lightning_gpp.capture.operators.grouping import NodeGroups, find_cycle
from lightning_gpp.capture.operators.normalize import observation
from lightning_gpp.capture.tracing.trace import Call, Names, closure

FEW = 64
"""Graphs of up to so many operators stay as they are; branches inside small blocks may matter."""
MANY = 400
"""With more operators, whole repeated modules become operators."""
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

Group = tuple[tuple[fx.Node, ...], Call | None]
"""The nodes of one operator in running order, and the call of a module for which they were joined.
"""
_Units = dict[Call | int, list[int]]
"""A call, or the number of an operator that stands for itself -> the operators in it."""


def coarsen(groups: Sequence[tuple[fx.Node, ...]], module: nn.Module) -> list[Group]:
    """The operators that a planner sees, in topological order.

    Args:
        groups: the smallest possible operators, in topological order.
        module: the captured module.
    """
    result: list[Group] = [(nodes, None) for nodes in groups]
    if len(groups) <= FEW:
        return result
    graph = _Graph(groups, module)
    for level in range(max(map(len, graph.blocks)) + 1, 0, -1):
        result = _joined(graph, graph.units(level))
        if len(result) <= MANY:
            break
    return result


class _Graph:
    """The smallest operators, numbered in topological order, and where they run.

    Attributes:
        groups: their nodes.
        reads: the operators that each reads.
        calls: the calls of modules around each, outermost first.
        blocks: positions in these of the calls of repeated modules.
    """

    def __init__(self, groups: Sequence[tuple[fx.Node, ...]], module: nn.Module) -> None:
        self.groups = groups
        names = Names.of(module).modules
        self._with_children = {
            name for name, item in module.named_modules() if next(item.children(), None) is not None
        }
        repeated = {
            names[id(item)]
            for container in module.modules()
            if isinstance(container, _CONTAINERS)
            for item in container.children()
            if [type(each) for each in container.children()].count(type(item)) > 1
        } & self._with_children
        number = {node: i for i, nodes in enumerate(groups) for node in nodes}
        self.reads = [
            {number[arg] for node in nodes for arg in node.all_input_nodes if arg in number} - {i}
            for i, nodes in enumerate(groups)
        ]
        self._num_readers = [0] * len(groups)
        for others in self.reads:
            for other in others:
                self._num_readers[other] += 1
        producers = [_producer(nodes) for nodes in groups]
        self._is_module = [node.op == "call_module" for node in producers]
        self.calls = [_stack(node) for node in producers]
        self.blocks = [
            [i for i, call in enumerate(calls) if call.name in repeated] for calls in self.calls
        ]

    def units(self, level: int) -> _Units:
        """What runs together.

        Args:
            level: repeated modules inside of ``level - 1`` others become units as a whole.
        """
        units: _Units = {}
        unit_of: list[Call | int] = []
        for i in range(len(self.groups)):
            key: Call | int | None = self._unit(i, level)
            if key is None and not self._is_module[i]:
                key = self._followed(i, unit_of, units)
            unit_of.append(i if key is None else key)
            units.setdefault(unit_of[i], []).append(i)
        return units

    def _unit(self, i: int, level: int) -> Call | None:
        calls, blocks = self.calls[i], self.blocks[i]
        if len(blocks) >= level:
            return calls[blocks[level - 1]]
        if blocks:
            return next(iter(calls[blocks[-1] + 1 :]), None)
        return calls[-1] if calls and calls[-1].name not in {"", *self._with_children} else None

    def _followed(self, i: int, unit_of: Sequence[Call | int], units: _Units) -> Call | int | None:
        """The unit that an operator of a repeated module may join without delaying any other."""
        block = self._block(i)
        inside = {other for other in self.reads[i] if self._block(other) == block}
        if block is None or not inside or self._num_readers[max(inside)] > 1:
            return None
        key = unit_of[max(inside)]
        members = frozenset(units[key])

        def needed(other: int) -> set[int]:
            is_inside = other in members or self._block(other) == block
            return self.reads[other] if is_inside else set()

        return key if self.reads[i] <= closure(members, needed) else None

    def _block(self, i: int) -> Call | None:
        """The innermost call of a repeated module around an operator."""
        return self.calls[i][self.blocks[i][-1]] if self.blocks[i] else None


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


def _joined(graph: _Graph, units: _Units) -> list[Group]:
    """The operators that units make, but for those that would wait for themselves."""
    while True:
        partition = NodeGroups([node for nodes in graph.groups for node in nodes])
        for members in units.values():
            for i in members:
                partition.join([graph.groups[members[0]][0], *graph.groups[i]])
        by_root = {
            partition.find(graph.groups[members[0]][0]): key for key, members in units.items()
        }
        cycle = [by_root[root] for root in find_cycle(partition.predecessors())]
        joined = [key for key in cycle if len(units[key]) > 1]
        if not joined:
            break
        widest = max(joined, key=lambda key: units[key][-1] - units[key][0])
        units |= {member: [member] for member in units.pop(widest)}
    result: list[Group] = []
    for nodes in partition.ordered():
        key = by_root[partition.find(nodes[0])]
        call = key if isinstance(key, Call) and len(units[key]) > 1 else None
        result.append((nodes, call))
    return result
