"""All series-parallel models of a few operators, and all their divisions into stages.

Independent of the planner: a division is any set of stages whose graph has no cycle, and
:func:`last_stages` says from the tree alone which of them the planner claims to consider.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from lightning_gpp.graph.series_parallel import Leaf, Parallel, Series, Tree, leaves

NONE: frozenset[int] = frozenset()

Stages = tuple[frozenset[int], ...]


@cache
def shapes(count: int, exclude: type | None = None) -> tuple[object, ...]:
    """Trees of so many nodes, each once: "." for a node, ("S", parts) or ("P", sorted parts)."""
    if count == 1:
        return (".",)
    found: list[object] = []
    if exclude is not Series:
        found += [("S", parts) for parts in _sequences(count, 2)]
    if exclude is not Parallel:
        found += [("P", parts) for parts in _multisets(count, 2)]
    return tuple(found)


@cache
def _sequences(count: int, least: int) -> tuple[tuple[object, ...], ...]:
    """Sequences of at least some parts of a series."""
    found = [] if least > 1 else [(part,) for part in shapes(count, Series)]
    for first in range(1, count):
        found += [
            (part, *rest)
            for part in shapes(first, Series)
            for rest in _sequences(count - first, max(1, least - 1))
        ]
    return tuple(found)


@cache
def _multisets(count: int, least: int) -> tuple[tuple[object, ...], ...]:
    """Multisets of at least some parts of a parallel."""
    found: set[tuple[object, ...]] = set()
    if least <= 1:
        found |= {(part,) for part in shapes(count, Parallel)}
    for first in range(1, count):
        for part in shapes(first, Parallel):
            for rest in _multisets(count - first, max(1, least - 1)):
                found.add(tuple(sorted((part, *rest), key=repr)))
    return tuple(sorted(found, key=repr))


def tree_of(shape: object) -> Tree:
    """The tree of a shape, its nodes numbered depth first."""
    numbers = itertools.count()

    def build(shape: object) -> Tree:
        if shape == ".":
            return Leaf(next(numbers))
        kind, parts = shape
        return (Series if kind == "S" else Parallel)(tuple(map(build, parts)))

    return build(shape)


def edges_of(tree: Tree) -> list[tuple[int, int]]:
    """The edges of the smallest graph with this tree."""
    found = []

    def ends(tree: Tree) -> tuple[list[int], list[int]]:
        if isinstance(tree, Leaf):
            return [tree.node], [tree.node]
        parts = [ends(part) for part in tree.parts]
        if isinstance(tree, Parallel):
            return [n for p in parts for n in p[0]], [n for p in parts for n in p[1]]
        for (_, sinks), (sources, _) in zip(parts, parts[1:]):
            found.extend(itertools.product(sinks, sources))
        return parts[0][0], parts[-1][1]

    ends(tree)
    return sorted(found)


def divisions(tree: Tree) -> list[Stages]:
    """Every division into stages whose graph has no cycle (so all stages are convex)."""
    nodes, edges = sorted(leaves(tree)), edges_of(tree)
    return [stages for stages in _partitions(nodes) if _is_acyclic(stages, edges)]


def _partitions(nodes: Sequence[int]) -> Iterator[Stages]:
    if not nodes:
        yield ()
        return
    for rest in _partitions(nodes[1:]):
        yield (frozenset(nodes[:1]), *rest)
        for index, group in enumerate(rest):
            yield (*rest[:index], group | {nodes[0]}, *rest[index + 1 :])


def _is_acyclic(stages: Stages, edges: Sequence[tuple[int, int]]) -> bool:
    home = {node: index for index, stage in enumerate(stages) for node in stage}
    left = {(home[a], home[b]) for a, b in edges if home[a] != home[b]}
    while left:
        free = {a for a, _ in left} - {b for _, b in left}
        if not free:
            return False
        left = {(a, b) for a, b in left if a not in free}
    return True


def final_stages(tree: Tree, stages: Stages) -> list[int]:
    """The stages that may be the last one in any division: those that nothing follows."""
    edges = edges_of(tree)
    return [
        index
        for index, stage in enumerate(stages)
        if not any(a in stage and b not in stage for a, b in edges)
    ]


def last_stages(tree: Tree, stages: Stages) -> list[int]:
    """The stages that may be the last one in divisions that the planner considers.

    By the words of ``graphpipe.partition``; none where it does not consider the division at all.
    """
    shapes = [_Shape(tree, stage) for stage in stages]
    return [
        last
        for last in range(len(stages))
        if shapes[last].before
        and all(shape.alone for index, shape in enumerate(shapes) if index != last)
        and all(_has_one_owner(block, stages, last) for block in _blocks(tree, True))
    ]


@dataclass(frozen=True)
class _Block:
    """A parallel part: the nodes of its branches, and the nodes around it.

    ``is_end``: whether the model ends with it.
    """

    branches: tuple[frozenset[int], ...]
    before: frozenset[int]
    after: frozenset[int]
    is_end: bool


def _blocks(
    tree: Tree, is_end: bool, before: frozenset[int] = NONE, after: frozenset[int] = NONE
) -> Iterator[_Block]:
    """Every parallel part."""
    if isinstance(tree, Leaf):
        return
    parts = [frozenset(leaves(part)) for part in tree.parts]
    if isinstance(tree, Parallel):
        yield _Block(tuple(parts), before, after, is_end)
        for part in tree.parts:
            yield from _blocks(part, is_end, before, after)
        return
    for index, part in enumerate(tree.parts):
        earlier, later = NONE.union(*parts[:index]), NONE.union(*parts[index + 1 :])
        yield from _blocks(part, is_end and not later, before | earlier, after | later)


def _has_one_owner(block: _Block, stages: Stages, last: int) -> bool:
    """Whether the stage with the fork and the one with the join take from the same branch."""
    inside = NONE.union(*block.branches)
    forks: list[int] = []
    joins: list[int] = []
    for index, stage in enumerate(stages):
        held = [n for n, branch in enumerate(block.branches) if stage & branch]
        if not held or inside <= stage:
            continue
        if stage & block.after or (block.is_end and index == last):
            joins = [n for n in held if not block.branches[n] <= stage] or held
        elif stage & block.before:
            forks = held
    return not (forks and joins) or set(forks) <= set(joins)


def _is_whole(tree: Tree, stage: frozenset[int]) -> bool:
    return set(leaves(tree)) <= stage


class _Shape:
    """What a stage takes of a part of the tree.

    ``alone``: a stage by itself. ``before``: the beginning of a stage that goes on behind the part
    (at the root: behind which the model ends). ``after``: the end of one that began before it.
    """

    def __init__(self, tree: Tree, stage: frozenset[int]) -> None:
        self.whole = _is_whole(tree, stage)
        self.alone = self.before = self.after = self.whole
        if isinstance(tree, Leaf) or self.whole:
            return
        held = [i for i, part in enumerate(tree.parts) if stage.intersection(leaves(part))]
        parts = [_Shape(tree.parts[index], stage) for index in held]
        if isinstance(tree, Parallel):
            all_whole = all(part.whole for part in parts)
            self.alone = all_whole if len(parts) > 1 else parts[0].alone
            self.before = any(
                part.before and all(o.whole for o in parts if o is not part) for part in parts
            )
            self.after = len(parts) == 1 and parts[0].after
            return
        if held != list(range(held[0], held[-1] + 1)):
            return
        first, last = parts[0], parts[-1]
        inner = all(part.whole for part in parts[1:-1])
        if len(parts) == 1:
            self.alone = first.alone
            self.before = first.before and held[0] == len(tree.parts) - 1
            self.after = first.after and held[0] == 0
            return
        has_middle = first.whole or last.whole or len(parts) > 2
        self.alone = first.before and inner and last.after and has_middle
        self.before = first.before and inner and last.whole and held[-1] == len(tree.parts) - 1
        self.after = first.whole and inner and last.after and held[0] == 0
