"""The series-parallel tree of a DAG, and how other DAGs become series-parallel.

What matters is the *order* that edges make (``a`` before ``b``), so an edge beside a longer path
(a skip connection) changes nothing. An order is series-parallel iff it is built from single nodes
by *series* (all of one part before all of the next) and *parallel* (nothing in between is ordered):
Valdes, Tarjan and Lawler, "The recognition of series parallel digraphs" (1982).

Other orders are made series-parallel by additional ordering: where a part is neither, a set of its
nodes closed under predecessors is put before the rest (*stratum synchronisation*, as in FlexFlow's
``sp_ization``), the set that orders the fewest additional pairs for its size. Nothing is computed
differently: only the search treats these nodes as ordered. Several sources or sinks need no virtual
nodes: the tree then begins or ends with a parallel part.

Sets are bit masks: ``O(n e / 64)`` time for the closure, ``O(n^2 / 64)`` per level of the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

MAX_NESTING = 100
"""Parts nested deeper than this become a chain."""

SPLIT_EFFORT = 40_000
"""Nodes to look at, over all candidates, to find one stratum."""


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


@dataclass(frozen=True, slots=True)
class Decomposition:
    """A tree, and what had to be ordered for it.

    Attributes:
        tree: every node in one leaf.
        added: (before, after) of the edges that made the graph series-parallel; empty where it was.
    """

    tree: Tree
    added: tuple[tuple[int, int], ...]


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


def decompose(predecessors: Sequence[Sequence[int]]) -> Decomposition:
    """The series-parallel tree of a DAG of at least one node.

    Args:
        predecessors: of each node; nodes are numbered in topological order.

    >>> decompose([(), (0,), (0,), (1, 2)]).tree  # a fork and its join
    Series(parts=(Leaf(node=0), Parallel(parts=(Leaf(node=1), Leaf(node=2))), Leaf(node=3)))
    >>> decompose([(), (), (0, 1), (1,)]).added  # 0 -> 2 <- 1 -> 3: the smallest that is not
    ((0, 3),)
    """
    decomposer = _Decomposer(predecessors)
    tree = decomposer.tree(list(range(len(predecessors))), nesting=0)
    return Decomposition(tree, tuple(sorted(decomposer.added)))


class _Decomposer:
    def __init__(self, predecessors: Sequence[Sequence[int]]) -> None:
        self._before: list[int] = []  # node -> mask of all nodes on paths to it
        self._sources = [set(sources) for sources in predecessors]
        for node, sources in enumerate(predecessors):
            mask = 0
            for source in sources:
                if not 0 <= source < node:
                    raise ValueError(f"edge {source}->{node} is not in topological order")
                mask |= self._before[source] | 1 << source
            self._before.append(mask)
        self.added: list[tuple[int, int]] = []

    def tree(self, nodes: list[int], nesting: int) -> Tree:
        """The tree of the order on some nodes, given in topological order."""
        if len(nodes) == 1:
            return Leaf(nodes[0])
        if nesting > MAX_NESTING:
            return self._chain(nodes)
        parts = self._components(nodes)
        if len(parts) > 1:
            trees = [self.tree(part, nesting + 1) for part in parts]
            return Parallel(tuple(p for tree in trees for p in _parallel_parts(tree)))
        parts = self._layers(nodes)
        if len(parts) == 1:
            parts = self._strata(nodes)
        trees = [self.tree(part, nesting + 1) for part in parts]
        return Series(tuple(p for tree in trees for p in _series_parts(tree)))

    def _components(self, nodes: list[int]) -> list[list[int]]:
        """Sets of nodes between which nothing is ordered."""
        inside = _mask(nodes)
        components: list[int] = []
        for node in nodes:
            joined = self._before[node] & inside | 1 << node
            apart = []
            for component in components:
                if component & joined:
                    joined |= component
                else:
                    apart.append(component)
            components = [*apart, joined]
        components.sort(key=lambda mask: mask & -mask)
        return [[node for node in nodes if mask >> node & 1] for mask in components]

    def _layers(self, nodes: list[int]) -> list[list[int]]:
        """The finest division into sets that come one completely after the other."""
        inside = _mask(nodes)
        order = sorted(nodes, key=lambda node: ((self._before[node] & inside).bit_count(), node))
        cuts, common, first = [len(order)], -1, inside
        for place in range(len(order) - 1, 0, -1):
            common &= self._before[order[place]]
            first &= ~(1 << order[place])
            if not first & ~common:
                cuts.append(place)
        cuts.append(0)
        cuts.reverse()
        return [sorted(order[start:stop]) for start, stop in zip(cuts, cuts[1:])]

    def _strata(self, nodes: list[int]) -> list[list[int]]:
        """Two sets to be put one after the other; the missing order is added."""
        inside = _mask(nodes)

        def missing(first: int) -> int:
            rest = [node for node in nodes if not first >> node & 1]
            size = first.bit_count()
            return sum(size - (self._before[node] & first).bit_count() for node in rest)

        def badness(first: int) -> tuple[float, int]:
            size = first.bit_count()
            smaller = min(size, len(nodes) - size)
            return missing(first) / smaller, -smaller

        first = min(self._candidates(nodes, inside), key=badness)
        one = [node for node in nodes if first >> node & 1]
        other = [node for node in nodes if not first >> node & 1]
        self._order(one, other)
        return [one, other]

    def _candidates(self, nodes: list[int], inside: int) -> list[int]:
        """Masks of some sets closed under predecessors, neither empty nor everything."""
        level = dict.fromkeys(nodes, 0)
        height = dict.fromkeys(nodes, 0)
        closed: dict[int, None] = {}
        for node in nodes:
            before = self._before[node] & inside
            closed[before] = closed[before | 1 << node] = None
            level[node] = 1 + max((level.get(n, -1) for n in self._sources[node]), default=-1)
        for node in reversed(nodes):
            for source in self._sources[node] & height.keys():
                height[source] = max(height[source], height[node] + 1)
        for rank in range(max(level.values())):
            closed[_mask(node for node in nodes if level[node] <= rank)] = None
        for rank in range(max(height.values())):
            closed[_mask(node for node in nodes if height[node] > rank)] = None
        masks = [mask for mask in closed if mask and mask != inside]
        masks.sort(key=int.bit_count)
        count = max(8, SPLIT_EFFORT // len(nodes))
        step = max(1, len(masks) // count)
        return masks[step // 2 :: step]

    def _order(self, first: list[int], second: list[int]) -> None:
        """Puts all of some nodes before all of others, and notes the edges that this takes."""
        mask = _mask(first)
        inner = 0
        for node in first:
            inner |= self._before[node] & mask
        ends = mask & ~inner
        others = _mask(second)
        for node in second:
            if not self._before[node] & others:
                new = list(_bits(ends & ~self._before[node]))
                self.added += [(end, node) for end in new]
                self._sources[node].update(new)
            self._before[node] |= mask

    def _chain(self, nodes: list[int]) -> Tree:
        for one, other in zip(nodes, nodes[1:]):
            if not self._before[other] >> one & 1:
                self.added.append((one, other))
                self._before[other] |= self._before[one] | 1 << one
        return Series(tuple(map(Leaf, nodes)))


def _mask(nodes: Iterable[int]) -> int:
    mask = 0
    for node in nodes:
        mask |= 1 << node
    return mask


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _series_parts(tree: Tree) -> tuple[Leaf | Parallel, ...]:
    return tree.parts if isinstance(tree, Series) else (tree,)


def _parallel_parts(tree: Tree) -> tuple[Leaf | Series, ...]:
    return tree.parts if isinstance(tree, Parallel) else (tree,)
