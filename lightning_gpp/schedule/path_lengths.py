"""How far what a stage makes has still to go: who is first where one of several has to wait.

A device sends its messages one after the other, and where it holds several stages it runs one
action at a time. Where all forwards come first, every stage ends its half at its own work plus the
path behind it, so what has the longest path to go is served first:

.. code-block:: text

    0 ──▶ 1 ──▶ 2 ──▶ 4     stage 0 sends to 1 before it sends to 3, which has time
    └───────▶ 3 ──────┘

Forwards against backwards is no question of paths alone, so schedules that mix them are not ordered
by this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_gpp.graph import FEED, StageEdge


@dataclass(frozen=True, slots=True)
class PathLengths:
    """Units that stages work on one after the other on the longest path to the end of a half.

    Attributes:
        forward: of every stage to the end of the forwards, its own micro-batch included.
        backward: of every stage back to the end of the backwards, likewise.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def forward_sends(self, edges: Iterable[StageEdge]) -> tuple[StageEdge, ...]:
        """The edges by source, those of every source in the order in which it sends on them."""
        return tuple(sorted(edges, key=lambda edge: (edge.source, -self.forward[edge.target])))

    def backward_sends(self, edges: Iterable[StageEdge]) -> tuple[StageEdge, ...]:
        """The edges by target, those of every target in the order in which it sends gradients.

        The feed, where the way ends, is last.
        """
        left = {FEED: 0.0, **dict(enumerate(self.backward))}
        return tuple(sorted(edges, key=lambda edge: (edge.target, -left[edge.source])))


def path_lengths(units: Sequence[float], edges: Iterable[StageEdge]) -> PathLengths:
    """The longest paths in a stage graph, or in that of a program.

    Args:
        units: in one micro-batch of every stage (of one of its replicas).
        edges: between the stages.

    >>> pairs = [(0, 1), (0, 3), (1, 2), (2, 4), (3, 4)]
    >>> path_lengths([1, 1, 1, 1, 2], [StageEdge(*pair, ("x",)) for pair in pairs])
    PathLengths(forward=(5, 4, 3, 3, 2), backward=(1, 2, 3, 2, 5))
    """
    inner = sorted((e for e in edges if e.source != FEED), key=lambda e: (e.source, e.target))
    forward, backward = list(units), list(units)
    for edge in reversed(inner):
        ahead = units[edge.source] + forward[edge.target]
        forward[edge.source] = max(forward[edge.source], ahead)
    for edge in inner:
        if edge.has_backward:
            behind = units[edge.target] + backward[edge.source]
            backward[edge.target] = max(backward[edge.target], behind)
    return PathLengths(tuple(forward), tuple(backward))
