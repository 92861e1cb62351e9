"""Runs while they are cut into stages: where a stage may begin, and where it may end.

What does not depend on micro-batches and limits, so that all searches of a model share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from lightning_gpp.planner.graphpipe.space.layout import ElementRun, Interval, Layout, joined

SMALL = 14
"""Up to this many units everything is tried; beyond, long stages are tried first."""

FEW_OWNERS = 2
"""In larger models, branches of a block that are tried as its owner, the heaviest first."""


@dataclass(frozen=True, slots=True)
class EndPoint:
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
        before: places on the way to it, in the frames that it is in.
        is_model_end: whether nothing follows the root.
    """

    def __init__(
        self,
        run: ElementRun,
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
        self.others: tuple[ElementRun, ...] = ()
        self._numbers = numbers
        self._most_owners = most_owners
        self._children: dict[int, tuple[Frame, ...]] = {}
        own = [EndPoint(self, boundary, (), ()) for boundary in range(1, len(run) + 1)]
        if outer is not None:
            branches = outer.run.blocks[element]
            self.others = branches[:owner] + branches[owner + 1 :]
        self.trunk: tuple[EndPoint, ...] = (*own, *self._behind())
        self.before: tuple[Interval, ...] = ()
        if outer is not None:
            self.before = (*outer.before, (outer.run.start, outer.run.bounds[element]))
        self._stages: dict[tuple[int, int], tuple[Interval, ...]] = {}

    def stage(self, boundary: int, index: int) -> tuple[Interval, ...]:
        """Intervals of a stage from one of its boundaries to a point of the trunk."""
        found = self._stages.get((boundary, index))
        if found is None:
            point, run = self.trunk[index], self.run
            is_own = point.frame is self and not point.crossed
            own = run.bounds[boundary], run.bounds[point.boundary if is_own else -1]
            found = self._stages[boundary, index] = joined((own,), *point.beyond)
        return found

    def _behind(self) -> Iterator[EndPoint]:
        """The points behind the join."""
        outer = self.outer
        if outer is None:
            return
        first = outer.run.bounds[self.element + 1]
        if outer.outer is None and outer.is_model_end and self.element + 1 == len(outer.run):
            yield EndPoint(outer, len(outer.run), (), (self,))
        for point in outer.trunk[self.element + 1 :]:
            is_in_outer = point.frame is outer
            stop = outer.run.bounds[point.boundary if is_in_outer and not point.crossed else -1]
            beyond = ((first, stop),) if stop > first else ()
            yield EndPoint(
                point.frame, point.boundary, beyond + point.beyond, (self, *point.crossed)
            )

    def children(self, element: int) -> tuple[Frame, ...]:
        """Frames with the first, different, branches of a block, if there is one, as its owner."""
        if element not in self.run.blocks:
            return ()
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


class Frames:
    """The frames of a layout.

    Attributes:
        layout: the layout.
        is_small: whether everything is tried, as asked for or as the model is so small.
        root: the frame of the whole model.
    """

    def __init__(self, layout: Layout, *, tries_all: bool = False) -> None:
        num_units = len(layout.order)
        self.layout = layout
        self.is_small = tries_all or num_units <= SMALL
        self._most_owners = num_units if self.is_small else FEW_OWNERS
        self._numbers = count()
        self.root = self._frame(layout.root, is_model_end=True)
        self._sides: dict[int, Frame] = {}
        self._kinds: dict[tuple[int, int], int] = {}
        self._beginnings: dict[tuple[ElementRun, int], ElementRun] = {}

    def side(self, run: ElementRun) -> Frame:
        """The frame of a branch that is cut on its own, the same for all branches like it."""
        frame = self._sides.get(run.kind)
        if frame is None:
            frame = self._sides[run.kind] = self._frame(run, is_model_end=False)
        return frame

    def beginning(self, run: ElementRun, size: int) -> ElementRun:
        """The first so many elements of a run, as a run: alike where the runs are alike."""
        found = self._beginnings.get((run, size))
        if found is None:
            # The kinds of whole runs are not negative.
            kind = self._kinds.setdefault((run.kind, size), -1 - len(self._kinds))
            blocks = {element: runs for element, runs in run.blocks.items() if element < size}
            found = ElementRun(run.bounds[: size + 1], blocks, kind)
            self._beginnings[run, size] = found
        return found

    def _frame(self, run: ElementRun, *, is_model_end: bool) -> Frame:
        most = self._most_owners
        return Frame(run, self._numbers, is_model_end=is_model_end, most_owners=most)
