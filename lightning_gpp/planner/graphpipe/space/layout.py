"""The units of a model in the order of its series-parallel tree, as *runs* of elements.

A run is a series: its elements are single units and *blocks* of parallel branches, each branch a
run of its own. Numbered depth first, every part of the tree is an interval of unit places, and a
stage is a few intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_gpp.graph.series_parallel import Leaf, Parallel, Series, Tree, leaves

Interval = tuple[int, int]
"""Places from the first up to (not including) the second."""


def joined(intervals: tuple[Interval, ...], *more: Interval) -> tuple[Interval, ...]:
    """Intervals in order, those that touch as one.

    >>> joined(((0, 2), (5, 6)), (2, 3))
    ((0, 3), (5, 6))
    """
    found: list[Interval] = []
    for start, stop in sorted((*intervals, *more)):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)


@dataclass(frozen=True, eq=False)
class ElementRun:
    """A series of elements.

    Attributes:
        bounds: where each element starts, and where the last one stops.
        blocks: element -> its branches, for the elements that are blocks.
        kind: runs of one kind are alike: same shape, same costs.
    """

    bounds: tuple[int, ...]
    blocks: dict[int, tuple[ElementRun, ...]]
    kind: int

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def start(self) -> int:
        """Place of its first unit."""
        return self.bounds[0]

    @property
    def interval(self) -> Interval:
        """All its places."""
        return self.bounds[0], self.bounds[-1]


@dataclass(frozen=True, eq=False)
class Layout:
    """A tree laid out.

    Attributes:
        order: unit at every place, in topological order.
        root: the whole model.
    """

    order: tuple[int, ...]
    root: ElementRun

    @cached_property
    def place(self) -> tuple[int, ...]:
        """Place of every unit."""
        places = [0] * len(self.order)
        for place, unit in enumerate(self.order):
            places[unit] = place
        return tuple(places)


def lay_out(tree: Tree, likeness: Sequence[object]) -> Layout:
    """Lays a tree out.

    Args:
        tree: the series-parallel tree of the units.
        likeness: of every unit; units that may stand for each other have an equal one.
    """
    kinds: dict[object, int] = {}

    def run(tree: Tree, start: int) -> tuple[ElementRun, object]:
        parts: Sequence[Tree] = tree.parts if isinstance(tree, Series) else (tree,)
        bounds, blocks, alike = [start], {}, []
        for element, part in enumerate(parts):
            if isinstance(part, Leaf):
                bounds.append(bounds[-1] + 1)
                alike.append(likeness[part.node])
            else:
                assert isinstance(part, Parallel)
                branches = []
                stop = bounds[-1]
                for branch in part.parts:
                    branches.append(run(branch, stop))
                    stop = branches[-1][0].bounds[-1]
                bounds.append(stop)
                blocks[element] = tuple(branch for branch, _ in branches)
                alike.append(tuple(key for _, key in branches))
        key = kinds.setdefault(tuple(alike), len(kinds))
        return ElementRun(tuple(bounds), blocks, key), ("run", key)

    return Layout(tuple(leaves(tree)), run(tree, 0)[0])


def heavy_first(tree: Tree, weights: Sequence[float]) -> Tree:
    """The tree with the branches of every parallel part from the heaviest to the lightest.

    Args:
        tree: a tree.
        weights: of every node.
    """
    if isinstance(tree, Leaf):
        return tree
    parts = tuple(heavy_first(part, weights) for part in tree.parts)
    if isinstance(tree, Series):
        return Series(parts)  # type: ignore[arg-type]
    weight = {part: sum(weights[node] for node in leaves(part)) for part in parts}
    return Parallel(tuple(sorted(parts, key=lambda part: -weight[part])))  # type: ignore[arg-type]
