"""An order of the units in which a branch stays together."""

from __future__ import annotations

from collections.abc import Sequence


def depth_first(predecessors: Sequence[Sequence[int]]) -> list[int]:
    """A topological order that follows a branch to its end before it begins the next one.

    Args:
        predecessors: of every unit.

    .. code-block:: text

        0 ─┬─ 1 ── 3 ─┬─ 5        0 1 3 2 4 5
           └─ 2 ── 4 ─┘

    >>> depth_first([[], [0], [0], [1], [2], [3, 4]])
    [0, 1, 3, 2, 4, 5]
    """
    successors: list[list[int]] = [[] for _ in predecessors]
    for unit, sources in enumerate(predecessors):
        for source in sources:
            successors[source].append(unit)
    missing = [len(set(sources)) for sources in predecessors]
    order: list[int] = []
    stack = [unit for unit, count in enumerate(missing) if not count][::-1]
    while stack:
        order.append(stack.pop())
        for target in reversed(successors[order[-1]]):
            missing[target] -= 1
            if not missing[target]:
                stack.append(target)
    return order
