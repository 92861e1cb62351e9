"""Fewer units for large models: light parts of the series-parallel tree become one unit each.

Parts of the tree are convex, so nothing that is merged can come to depend on itself. Neighbours of
a series are merged up to a limit, a block with all its branches when all of it is light.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpp.graph.series_parallel import Leaf, Parallel, Tree, leaves

TRIFLE = 1.15
"""A heavy unit may take in neighbours that make it this much heavier, all together."""


def light_groups(tree: Tree, weights: Sequence[float], limit: float) -> list[list[int]]:
    """Groups of nodes, each node in one; every group but single nodes is light.

    Args:
        tree: the tree.
        weights: of every node.
        limit: weight up to which a group is light.

    >>> from lightning_gpp.graph.series_parallel import Series
    >>> chain = Series((Leaf(0), Leaf(1), Leaf(2), Leaf(3)))
    >>> light_groups(chain, [1, 1, 1, 5], limit=2)
    [[0, 1], [2], [3]]
    """
    nodes = list(leaves(tree))
    if sum(weights[node] for node in nodes) <= limit or isinstance(tree, Leaf):
        return [nodes]
    if isinstance(tree, Parallel):
        return [group for part in tree.parts for group in light_groups(part, weights, limit)]
    groups: list[list[int]] = []
    total = heaviest = 0.0
    is_open = False  # whether the last group may take in what follows
    for part in tree.parts:
        inside = light_groups(part, weights, limit)
        if len(inside) > 1:
            groups += inside
            is_open = False
            continue
        weight = sum(weights[node] for node in inside[0])
        most = max(limit, TRIFLE * max(heaviest, weight))
        if is_open and total + weight <= most:
            groups[-1] += inside[0]
            total, heaviest = total + weight, max(heaviest, weight)
        else:
            groups += inside
            total = heaviest = weight
        is_open = True
    return groups
