"""All series-parallel models of a few operators, and all their divisions into stages.

Independent of the planner: a division is any set of stages whose graph has no cycle.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

Stages = tuple[frozenset[int], ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One node."""

    node: int


@dataclass(frozen=True, slots=True)
class Series:
    """Parts one after the other; none of them is a series, and there are at least two."""

    parts: tuple[Leaf | Parallel, ...]


@dataclass(frozen=True, slots=True)
class Parallel:
    """Parts side by side; none of them is a parallel, and there are at least two."""

    parts: tuple[Leaf | Series, ...]


Tree = Leaf | Series | Parallel
"""A series-parallel tree."""


def leaves(tree: Tree) -> Iterator[int]:
    """The nodes of a tree, depth first, which is a topological order.

    >>> list(leaves(Series((Leaf(0), Parallel((Leaf(2), Leaf(1)))))))
    [0, 2, 1]
    """
    stack: list[Tree] = [tree]
    while stack:
        part = stack.pop()
        if isinstance(part, Leaf):
            yield part.node
        else:
            stack.extend(reversed(part.parts))


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
