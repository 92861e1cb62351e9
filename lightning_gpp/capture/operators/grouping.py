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
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from lightning_gpp.capture.operators.observe import Observation
from lightning_gpp.capture.values.structure import LOOK_UPS


def group_nodes(
    nodes: Sequence[fx.Node],
    observations: Sequence[Mapping[str, Observation]],
    buffers_of: Mapping[str, frozenset[str]],
) -> list[tuple[fx.Node, ...]]:
    """The operators, in topological order, each with its nodes in running order.

    Args:
        nodes: the graph in running order.
        observations: by node name, one mapping per mode.
        buffers_of: node name -> canonical names of the buffers it reads.
    """
    work = [node for node in nodes if node.op.startswith("call_")]
    groups = NodeGroups(work)
    for by_name in observations:
        _join_memory(groups, nodes, by_name)
        _join_buffers(groups, work, by_name, buffers_of)
    _join_look_ups(groups, work, observations[0])
    groups.close_cycles()
    _join_generators(groups, observations[0])
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
        found, stack = {group}, [group]
        while stack:
            users = {user for node in members[stack.pop()] for user in node.users}
            fresh = {self.find(user) for user in users if user in self.parent} - found
            found |= fresh
            stack += fresh
        return found

    def close_cycles(self) -> None:
        """Joins the groups that wait for each other."""
        for component in strong_components(self.predecessors()):
            self.join(component)

    def ordered(self) -> list[tuple[fx.Node, ...]]:
        """The groups in topological order; as in the forward where there is a choice."""
        members, waiting = self.members(), self.predecessors()
        readers: dict[fx.Node, list[fx.Node]] = {group: [] for group in members}
        for group, others in waiting.items():
            for other in others:
                readers[other].append(group)
        missing = {group: len(others) for group, others in waiting.items()}
        ready = [(self.order[members[group][0]], group) for group in members if not missing[group]]
        heapq.heapify(ready)
        result = []
        while ready:
            group = heapq.heappop(ready)[1]
            result.append(tuple(members[group]))
            for reader in readers[group]:
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready, (self.order[members[reader][0]], reader))
        return result


def _join_memory(
    groups: NodeGroups, nodes: Sequence[fx.Node], observations: Mapping[str, Observation]
) -> None:
    seen: dict[int, list[fx.Node]] = {}
    for node in nodes:
        observation = observations[node.name]
        for storage in observation.touched:
            seen.setdefault(storage, []).append(node)
        for storage in observation.changed:
            groups.join(seen[storage])


def _join_buffers(
    groups: NodeGroups,
    nodes: Sequence[fx.Node],
    observations: Mapping[str, Observation],
    buffers_of: Mapping[str, frozenset[str]],
) -> None:
    changed = frozenset().union(*(observations[node.name].changed_buffers for node in nodes))
    for buffer in sorted(changed):
        groups.join(node for node in nodes if buffer in buffers_of[node.name])


def _join_look_ups(
    groups: NodeGroups, nodes: Sequence[fx.Node], observations: Mapping[str, Observation]
) -> None:
    """Item look-ups, sizes, arithmetic on sizes and guards join the one group they read."""
    for node in nodes:
        is_look_up = node.target in LOOK_UPS and not _is_tensor(node.args[0], observations)
        is_number = not observations[node.name].has_tensors and node.op != "call_module"
        if is_look_up or is_number:
            read = groups.inputs([node])
            if len(read) == 1:
                groups.join([*read, node])


def _is_tensor(value: object, observations: Mapping[str, Observation]) -> bool:
    """Whether a look-up in ``value`` would be an indexing of a tensor."""
    if not isinstance(value, fx.Node):
        return False
    return observations[value.name].is_tensor


def _join_generators(groups: NodeGroups, observations: Mapping[str, Observation]) -> None:
    """What waits for no other operator and is no work joins one that is in its way anyway."""
    is_finished = False
    while not is_finished:
        is_finished = True
        for members in groups.members().values():
            target = _host_of_generator(groups, members, observations)
            if target is not None:
                groups.join([target, members[0]])
                is_finished = False


def _host_of_generator(
    groups: NodeGroups, members: Sequence[fx.Node], observations: Mapping[str, Observation]
) -> fx.Node | None:
    """The group that a group should join: its only reader, or one that all its readers need.

    For sizes of an input that is an operator which reads the input and leads to all readers of
    the size: so the input need not travel to where only its size is wanted.
    """
    group = groups.find(members[0])
    if set(groups.inputs(members)) - {group}:
        return None
    inputs = {arg for node in members for arg in node.all_input_nodes if arg.op == "placeholder"}
    users = [user for node in members for user in node.users]
    if inputs and any(observations[node.name].has_tensors for node in members):
        return None
    if any(user.op == "output" for user in users):
        return None
    readers = {groups.find(user) for user in users} - {group}
    hosts = (
        groups.find(user) for tensor in inputs for user in tensor.users if user in groups.parent
    )
    for host in dict.fromkeys(hosts):
        if host is not group and readers <= groups.reachable(host):
            return host
    return readers.pop() if len(readers) == 1 else None


def strong_components(predecessors: Mapping[fx.Node, Sequence[fx.Node]]) -> list[list[fx.Node]]:
    """Strongly connected components (Kosaraju, without recursion)."""
    finished: list[fx.Node] = []
    seen: set[fx.Node] = set()
    for start in predecessors:
        stack = [(start, iter(predecessors[start]))] if start not in seen else []
        seen.add(start)
        while stack:
            node, rest = stack[-1]
            step = next((item for item in rest if item not in seen), None)
            if step is None:
                finished.append(node)
                stack.pop()
            else:
                seen.add(step)
                stack.append((step, iter(predecessors[step])))
    successors: dict[fx.Node, list[fx.Node]] = {node: [] for node in predecessors}
    for node, others in predecessors.items():
        for other in others:
            successors[other].append(node)
    return _components(reversed(finished), successors)


def _components(
    order: Iterable[fx.Node], successors: Mapping[fx.Node, Sequence[fx.Node]]
) -> list[list[fx.Node]]:
    components = []
    seen: set[fx.Node] = set()
    for start in order:
        if start in seen:
            continue
        component, stack = [], [start]
        seen.add(start)
        while stack:
            node = stack.pop()
            component.append(node)
            fresh = [item for item in successors[node] if item not in seen]
            seen.update(fresh)
            stack += fresh
        components.append(component)
    return components
