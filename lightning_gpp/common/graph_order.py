"""Cycles and orders of directed graphs, as mappings from every node to its successors."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter


def find_cycle(successors: Mapping[int, Iterable[int]]) -> list[int]:
    """A cycle as its nodes in order, or an empty list.

    >>> find_cycle({0: [1], 1: [2], 2: [1]})
    [1, 2]
    >>> find_cycle({0: [1], 1: []})
    []
    """
    try:
        TopologicalSorter(successors).prepare()
    except CycleError as error:
        cycle: list[int] = error.args[1][:0:-1]  # without its beginning at the end, the other way
        first = cycle.index(min(cycle))
        return cycle[first:] + cycle[:first]
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
