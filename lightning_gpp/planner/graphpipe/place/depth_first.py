"""An order of the units in which a branch stays together."""

from __future__ import annotations

from collections.abc import Sequence


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
