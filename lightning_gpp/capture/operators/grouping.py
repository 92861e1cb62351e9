"""Groups nodes to operators.

An operator is the smallest thing that a planner places, so nodes that must not be parted, or are
not worth parting, form one:

- an item look-up or a size stays with the node whose result it looks at;
- a guard stays with what it checks;
- what depends on no input (``torch.arange(4)``) and what only computes with the sizes of inputs
  goes to its only reader;
- an in-place change stays with everything that touches the same memory up to then: the producer
  of the memory, earlier readers (they must not see the change), earlier changes;
- all nodes that touch a buffer which forward changes: the buffer lives on one device.

Joining can close a cycle over nodes in between; then these join too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torch import fx, nn

from lightning_gpp.capture.operators.observe import observation
from lightning_gpp.capture.tracing.trace import Call, Names, Trace, closure
from lightning_gpp.capture.values.structure import LOOK_UPS
from lightning_gpp.common.graph_order import find_cycle, topological_order


def group_nodes(
    traces: Mapping[bool, Trace], buffers_of: Mapping[str, frozenset[str]]
) -> list[tuple[fx.Node, ...]]:
    """The operators, in topological order, each with its nodes in running order.

    Args:
        traces: normalized, by training flag; the nodes are those in training.
        buffers_of: node name -> canonical names of the buffers it reads.
    """
    nodes = [node for node in traces[True].graph.nodes if node.op != "output"]
    work = [node for node in nodes if node.op.startswith("call_")]
    groups = NodeGroups(work)
    for trace in traces.values():
        seen = [observation(node) for node in trace.graph.nodes if node.op != "output"]
        users: dict[int, list[fx.Node]] = {}
        for node, item in zip(nodes, seen, strict=True):
            for storage in item.touched:
                users.setdefault(storage, []).append(node)
            for storage in item.changed:
                groups.join(users[storage])
        for buffer in sorted(frozenset().union(*(item.changed_buffers for item in seen))):
            groups.join(node for node in work if buffer in buffers_of[node.name])
    _join_look_ups(groups, work)
    groups.close_cycles()
    _join_generators(groups)
    groups.close_cycles()
    return groups.ordered()


class NodeGroups:
    """A partition of nodes that only becomes coarser; a group is named by its first node.

    Args:
        nodes: in running order.
    """

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.nodes, self.number = nodes, {node: number for number, node in enumerate(nodes)}
        self._parent = list(range(len(nodes)))

    def find(self, node: fx.Node) -> int:
        """The group of a node."""
        group = self.number[node]
        while self._parent[group] != group:
            self._parent[group] = group = self._parent[self._parent[group]]
        return group

    def join(self, nodes: Iterable[fx.Node]) -> None:
        """Puts nodes into one group (nodes that are no operators are left out)."""
        first, *others = sorted({self.find(node) for node in nodes if node in self.number}) or [0]
        for group in others:
            self._parent[group] = first

    def inputs(self, nodes: Iterable[fx.Node]) -> set[int]:
        """The groups that the given nodes read."""
        return {self.find(a) for node in nodes for a in node.all_input_nodes if a in self.number}

    def members(self) -> dict[int, list[fx.Node]]:
        """Group -> nodes in running order."""
        members: dict[int, list[fx.Node]] = {}
        for node in self.nodes:
            members.setdefault(self.find(node), []).append(node)
        return members

    def successors(self) -> dict[int, set[int]]:
        """Group -> the other groups that read it."""
        members = self.members()
        found: dict[int, set[int]] = {group: set() for group in members}
        for reader, nodes in members.items():
            for group in self.inputs(nodes) - {reader}:
                found[group].add(reader)
        return found

    def close_cycles(self) -> None:
        """Joins the groups that wait for each other."""
        while cycle := find_cycle(self.successors()):
            self.join(self.nodes[group] for group in cycle)

    def ordered(self) -> list[tuple[fx.Node, ...]]:
        """The groups in topological order; as in the forward where there is a choice."""
        members = self.members()
        return [tuple(members[group]) for group in topological_order(self.successors())]


def _join_look_ups(groups: NodeGroups, nodes: Sequence[fx.Node]) -> None:
    """Item look-ups, sizes, arithmetic on sizes and guards join the one group they read."""
    for node in nodes:
        of = node.args[0] if node.target in LOOK_UPS else None
        is_indexing = isinstance(of, fx.Node) and observation(of).is_tensor
        is_look_up = node.target in LOOK_UPS and not is_indexing
        is_number = not observation(node).has_tensors and node.op != "call_module"
        if is_look_up or is_number:
            read = groups.inputs([node])
            if len(read) == 1:
                groups.join([groups.nodes[read.pop()], node])


def _join_generators(groups: NodeGroups) -> None:
    """What waits for no other operator and is no work joins one that is in its way anyway."""
    has_joined = True
    while has_joined:
        has_joined = False
        for members in groups.members().values():
            target = _host_of_generator(groups, members)
            if target is not None:
                groups.join([groups.nodes[target], members[0]])
                has_joined = True


def _host_of_generator(groups: NodeGroups, members: Sequence[fx.Node]) -> int | None:
    """The group that a group should join: its only reader, or one that all its readers need.

    For sizes of an input that is an operator which reads the input and leads to all readers of
    the size: so the input need not travel to where only its size is wanted.
    """
    group, users = groups.find(members[0]), {user for node in members for user in node.users}
    inputs = {arg for node in members for arg in node.all_input_nodes if arg.op == "placeholder"}
    if groups.inputs(members) - {group} or any(user.op == "output" for user in users):
        return None
    if inputs and any(observation(node).has_tensors for node in members):
        return None
    readers = set(map(groups.find, users)) - {group}
    near = {
        groups.find(user) for tensor in inputs for user in tensor.users if user in groups.number
    }
    successors = groups.successors() if near else {}
    for host in sorted(near - {group}):
        if readers <= closure([host], successors.__getitem__):
            return host
    return readers.pop() if len(readers) == 1 else None


# Large models ------------------------------------------------------------------------------------
#
# A planner has nothing to choose inside of an attention, and a deep transformer has thousands of
# calls. A module *repeats* where a container holds several of its class (``h.0``, ``h.1``, …).
# In a graph of many operators these become one:
#
# - what runs inside one call of a child of the innermost repeated module (``h.3.attn``);
# - outside of repeated modules, what runs inside one call of a module without sub-modules;
# - what a repeated module computes itself (the residual addition) and the child whose result only
#   it reads, if it waits for nothing that the child does not wait for: then no branch is delayed.
#
# If there still are very many, whole repeated modules become one, innermost first. A call is known
# by its number, not by its name alone: two calls of one module have others in between. A group that
# would wait for itself (a path leaves it and comes back) is taken apart again.


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
    graph = _Graph(groups, module)
    if any(graph.layers):
        result = _joined(graph, graph.units(None))
    if len(result) <= FEW:
        return result
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
        layers: the call of an opened layer that each belongs to.
        calls: the calls of modules around each, or around its layer, outermost first.
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
            for kinds in [Counter(map(type, container.children()))]
            for item in container.children()
            if kinds[type(item)] > 1
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
        # the first node that makes a tensor; look-ups on it may run in later calls
        producers = [next((n for n in g if observation(n).has_tensors), g[0]) for g in groups]
        self.layers: list[Call | None] = [node.meta.get("layer") for node in producers]
        self._is_module = [node.op == "call_module" for node in producers]
        self.calls = [_stack(node) for node in producers]
        self.blocks = [
            [i for i, call in enumerate(calls) if call.name in repeated] for calls in self.calls
        ]

    def units(self, level: int | None) -> _Units:
        """What runs together.

        Args:
            level: repeated modules inside of ``level - 1`` others become units as a whole; None
                joins opened layers only.
        """
        units: _Units = {}
        unit_of: list[Call | int] = []
        for i, layer in enumerate(self.layers):
            key: Call | int | None = layer if level is None else self._unit(i, level) or layer
            if key is None and level is not None and not self._is_module[i]:
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


def _stack(node: fx.Node) -> tuple[Call, ...]:
    """The calls around a node, or around its layer."""
    calls, layer = node.meta.get("calls", ()), node.meta.get("layer")
    return tuple(itertools.takewhile(lambda call: call != layer, calls))


def _joined(graph: _Graph, units: _Units) -> list[Group]:
    """The operators that units make, but for those that would wait for themselves."""
    while True:
        key_of = {members[0]: key for key, members in units.items()}
        unit_of = {i: members[0] for members in units.values() for i in members}
        successors: dict[int, set[int]] = {first: set() for first in key_of}
        for i, read in enumerate(graph.reads):
            for other in read:
                if unit_of[other] != unit_of[i]:
                    successors[unit_of[other]].add(unit_of[i])
        cycle = [key_of[first] for first in find_cycle(successors)]
        if not cycle:
            break
        joined = [key for key in cycle if len(units[key]) > 1]
        widest = max(joined, key=lambda key: units[key][-1] - units[key][0])
        units |= {member: [member] for member in units.pop(widest)}
    result: list[Group] = []
    for first in topological_order(successors):
        key, members = key_of[first], units[key_of[first]]
        is_joined = len(members) > 1 or key in graph.layers
        call = key if isinstance(key, Call) and is_joined else None
        result.append((tuple(node for i in members for node in graph.groups[i]), call))
    return result
