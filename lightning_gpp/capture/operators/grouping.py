"""Which nodes form one operator.

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

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from torch import fx

from lightning_gpp.capture.operators.normalize import observation
from lightning_gpp.capture.tracing.trace import Trace, closure
from lightning_gpp.capture.values.structure import LOOK_UPS


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
    """A partition of nodes that only grows coarser."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.order = {node: position for position, node in enumerate(nodes)}
        self.parent = {node: node for node in nodes}

    def find(self, node: fx.Node) -> fx.Node:
        """The representative of a node's group."""
        while self.parent[node] is not node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node

    def join(self, nodes: Iterable[fx.Node]) -> None:
        """Puts nodes into one group (nodes that are no operators are left out)."""
        roots = [self.find(node) for node in nodes if node in self.parent]
        for root in roots[1:]:
            self.parent[self.find(root)] = self.find(roots[0])

    def inputs(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """The groups that the given nodes read."""
        found = (arg for node in nodes for arg in node.all_input_nodes if arg in self.parent)
        return list(dict.fromkeys(map(self.find, found)))

    def members(self) -> dict[fx.Node, list[fx.Node]]:
        """Representative -> nodes in running order."""
        members: dict[fx.Node, list[fx.Node]] = {}
        for node in self.order:
            members.setdefault(self.find(node), []).append(node)
        return members

    def predecessors(self) -> dict[fx.Node, list[fx.Node]]:
        """Group -> the other groups it reads."""
        return {
            group: [other for other in self.inputs(nodes) if other is not group]
            for group, nodes in self.members().items()
        }

    def reachable(self, group: fx.Node) -> set[fx.Node]:
        """The groups that wait for ``group``, itself included."""
        members = self.members()

        def readers(of: fx.Node) -> Iterator[fx.Node]:
            users = (user for node in members[of] for user in node.users)
            return (self.find(user) for user in users if user in self.parent)

        return closure([group], readers)

    def close_cycles(self) -> None:
        """Joins the groups that wait for each other."""
        while cycle := find_cycle(self.predecessors()):
            self.join(cycle)

    def ordered(self) -> list[tuple[fx.Node, ...]]:
        """The groups in topological order; as in the forward where there is a choice."""
        members, sorter = self.members(), TopologicalSorter(self.predecessors())
        sorter.prepare()
        ready: list[tuple[int, fx.Node]] = []
        result = []
        while sorter.is_active():
            for group in sorter.get_ready():
                heapq.heappush(ready, (self.order[members[group][0]], group))
            group = heapq.heappop(ready)[1]
            result.append(tuple(members[group]))
            sorter.done(group)
        return result


def find_cycle(predecessors: Mapping[fx.Node, Iterable[fx.Node]]) -> list[fx.Node]:
    """Groups that wait for each other; empty if there are none."""
    try:
        TopologicalSorter(predecessors).prepare()
    except CycleError as error:
        cycle: list[fx.Node] = error.args[1]
        return cycle
    return []


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
                groups.join([*read, node])


def _join_generators(groups: NodeGroups) -> None:
    """What waits for no other operator and is no work joins one that is in its way anyway."""
    has_joined = True
    while has_joined:
        has_joined = False
        for members in groups.members().values():
            target = _host_of_generator(groups, members)
            if target is not None:
                groups.join([target, members[0]])
                has_joined = True


def _host_of_generator(groups: NodeGroups, members: Sequence[fx.Node]) -> fx.Node | None:
    """The group that a group should join: its only reader, or one that all its readers need.

    For sizes of an input that is an operator which reads the input and leads to all readers of
    the size: so the input need not travel to where only its size is wanted.
    """
    group, users = groups.find(members[0]), {user for node in members for user in node.users}
    inputs = {arg for node in members for arg in node.all_input_nodes if arg.op == "placeholder"}
    if set(groups.inputs(members)) - {group} or any(user.op == "output" for user in users):
        return None
    if inputs and any(observation(node).has_tensors for node in members):
        return None
    readers = set(map(groups.find, users)) - {group}
    near = (user for tensor in inputs for user in tensor.users if user in groups.parent)
    for host in dict.fromkeys(map(groups.find, near)):
        if host is not group and readers <= groups.reachable(host):
            return host
    return readers.pop() if len(readers) == 1 else None
