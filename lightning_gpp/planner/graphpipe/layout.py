"""The units of a model in the order of its series-parallel tree, as *runs* of elements.

A run is a series: its elements are single units and *blocks* of parallel branches, each branch a
run of its own. Numbered depth first, every part of the tree is an interval of unit places, and a
stage is a few intervals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_gpp.graph.series_parallel import Leaf, Parallel, Series, Tree, leaves

Interval = tuple[int, int]
"""Places from the first up to (not including) the second."""


@dataclass(frozen=True, eq=False)
class Run:
    """A series of elements.

    Attributes:
        bounds: where each element starts, and where the last one stops.
        blocks: element -> its branches, for the elements that are blocks.
        kind: runs of one kind are alike: same shape, same costs.
    """

    bounds: tuple[int, ...]
    blocks: dict[int, tuple[Run, ...]]
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
    root: Run

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

    def run(tree: Tree, start: int) -> tuple[Run, object]:
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
        return Run(tuple(bounds), blocks, key), ("run", key)

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


@dataclass(frozen=True, slots=True)
class Point:
    """A place where a stage that begins in some frame may end.

    Attributes:
        frame: the frame that the stage ends in.
        boundary: the element of the frame's run before which it ends.
        beyond: intervals of the stage behind the run that it begins in.
        crossed: frames whose join the stage holds, innermost first.
    """

    frame: Frame
    boundary: int
    beyond: tuple[Interval, ...]
    crossed: tuple[Frame, ...]


class Frame:
    """A run while it is cut into stages, together with what follows it.

    Inside a block one branch is the *owner*: its frame continues behind the join, so that one
    stage may hold the end of the branch, the join, and more. The other branches are cut on their
    own.

    Attributes:
        number: unique in its root.
        run: the run.
        outer: the frame that holds the block; None for a root.
        element: the block in the outer run.
        others: the other branches of the block.
        level: number of joins that follow it.
        trunk: the points on the way from its first element on, the longest last.
        is_model_end: whether nothing follows the root.
    """

    def __init__(
        self,
        run: Run,
        numbers: Iterator[int],
        *,
        is_model_end: bool,
        most_owners: int,
        outer: Frame | None = None,
        element: int = 0,
        owner: int = 0,
    ) -> None:
        self.number = next(numbers)
        self.run = run
        self.outer = outer
        self.element = element
        self.is_model_end = is_model_end
        self.level: int = outer.level + 1 if outer else 0
        self.others: tuple[Run, ...] = ()
        self._numbers = numbers
        self._most_owners = most_owners
        self._children: dict[int, tuple[Frame, ...]] = {}
        own = [Point(self, boundary, (), ()) for boundary in range(1, len(run) + 1)]
        if outer is not None:
            branches = outer.run.blocks[element]
            self.others = branches[:owner] + branches[owner + 1 :]
        self.trunk: tuple[Point, ...] = (*own, *self._behind())

    def _behind(self) -> Iterator[Point]:
        """The points behind the join."""
        outer = self.outer
        if outer is None:
            return
        first = outer.run.bounds[self.element + 1]
        if outer.outer is None and outer.is_model_end and self.element + 1 == len(outer.run):
            yield Point(outer, len(outer.run), (), (self,))
        for point in outer.trunk[self.element + 1 :]:
            is_in_outer = point.frame is outer
            stop = outer.run.bounds[point.boundary if is_in_outer and not point.crossed else -1]
            beyond = ((first, stop),) if stop > first else ()
            yield Point(point.frame, point.boundary, beyond + point.beyond, (self, *point.crossed))

    def children(self, element: int) -> tuple[Frame, ...]:
        """Frames with the first, different, branches of a block as its owner."""
        if element not in self._children:
            branches = self.run.blocks[element]
            first = {branch.kind: index for index, branch in reversed([*enumerate(branches)])}
            self._children[element] = tuple(
                Frame(
                    branches[index],
                    self._numbers,
                    is_model_end=self.is_model_end,
                    most_owners=self._most_owners,
                    outer=self,
                    element=element,
                    owner=index,
                )
                for index in sorted(first.values())[: self._most_owners]
            )
        return self._children[element]
