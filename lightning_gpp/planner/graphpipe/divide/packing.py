"""Branches packed into stages by time: first-fit decreasing.

From the heaviest branches to the lightest, each one goes into the first stage that has room for it.
Branches that are alike go together, and stages that hold as many of each are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from lightning_gpp.planner.graphpipe.space.branches import AlikeBranches, Group, Mix

Stack = tuple[Mix, int]
"""Stages that hold as many branches of each weight: these branches, and how many stages."""


def first_fit(
    loads: Sequence[AlikeBranches], limit_s: float, may_be: Callable[[Mix], bool] | None = None
) -> tuple[list[Stack], float]:
    """Packs branches into stages, each into the first one that has room for it.

    Args:
        loads: the branches, the heaviest first.
        limit_s: seconds per sample that a stage may take; a branch that takes more is alone.
        may_be: what else decides about several branches in a stage, as memory does. Where it
            forbids some it forbids them with more, too.

    Returns:
        The stages, and a larger limit up to which they stay the same.

    >>> heavy = AlikeBranches(2.0, weight=7, num_alike=5)
    >>> first_fit([heavy, AlikeBranches(1.0, weight=8, num_alike=1)], limit_s=5.0)
    ([(((7, 2), (8, 1)), 1), (((7, 2),), 1), (((7, 1),), 1)], 6.0)
    """
    stages: list[tuple[Mix, int, float]] = []  # the branches of each, how many, and their room
    least_lack_s = math.inf
    for each_s, weight, left in loads:
        found: list[tuple[Mix, int, float]] = []
        for mix, count, room_s in (*stages, ((), left, limit_s)):  # the last ones are still empty
            fit = 0  # branches of this load for each of these stages
            if left:
                if each_s <= room_s:
                    fit = left if left * each_s <= room_s else int(room_s / each_s)
                elif not mix:
                    fit = 1
                if fit < left:
                    least_lack_s = min(least_lack_s, (fit + 1) * each_s - room_s)
                while may_be and fit > (not mix) and not may_be((*mix, (weight, fit))):
                    fit -= 1
            if fit:  # some stages take as many as fit, the next one the rest, others none
                full = min(count, left // fit)
                found.append(((*mix, (weight, fit)), full, room_s - fit * each_s))
                left -= full * fit
                count -= full
                if left and count:
                    found.append(((*mix, (weight, left)), 1, room_s - left * each_s))
                    left = 0
                    count -= 1
            if count and mix:
                found.append((mix, count, room_s))
        stages = found
    return [(mix, count) for mix, count, _ in stages], limit_s + least_lack_s


def groups_of(stacks: Sequence[Stack], by_weight: Mapping[int, Group]) -> list[list[Group]]:
    """The branches of every stage, stack by stack.

    Args:
        stacks: the stages.
        by_weight: the branches.
    """
    used = dict.fromkeys(by_weight, 0)
    found = []
    for mix, count in stacks:
        groups = []
        for _ in range(count):
            group: Group = ()
            for weight, number in mix:
                first = used[weight]
                group += by_weight[weight][first : first + number]
                used[weight] = first + number
            groups.append(group)
        found.append(groups)
    return found
