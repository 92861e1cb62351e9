"""Small questions about directed graphs given as node -> successors."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from lightning_gpp.graph import ModelGraph


def find_cycle(successors: Mapping[int, Iterable[int]]) -> list[int]:
    """A cycle as its nodes in order, or an empty list.

    >>> find_cycle({0: [1], 1: [2], 2: [1]})
    [1, 2]
    >>> find_cycle({0: [1], 1: []})
    []
    """
    finished: set[int] = set()
    for root in successors:
        path = [root]
        targets = [iter(sorted(successors[root]))]
        while path:
            node = next((target for target in targets[-1] if target not in finished), None)
            if node is None:
                finished.add(path.pop())
                targets.pop()
            elif node in path:
                return path[path.index(node) :]
            else:
                path.append(node)
                targets.append(iter(sorted(successors[node])))
    return []


def topological_order(successors: Mapping[int, Iterable[int]]) -> list[int]:
    """The nodes of an acyclic graph, sources first; of those that can come next, the smallest.

    >>> topological_order({0: [1], 2: [1], 1: []})
    [0, 2, 1]
    """
    missing = dict.fromkeys(successors, 0)
    for targets in successors.values():
        for target in targets:
            missing[target] += 1
    ready = sorted(node for node, count in missing.items() if not count)
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready))
        for target in successors[order[-1]]:
            missing[target] -= 1
            if not missing[target]:
                heapq.heappush(ready, target)
    return order


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
