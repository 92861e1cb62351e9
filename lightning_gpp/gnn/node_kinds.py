"""Kinds of values in a forward that runs on chunks, and what all of its parts share.

Every node is of a kind:

===========  ===========================================================================
``WHOLE``    depends on the graph and on constants alone; computed once, for all vertices
``SIZE``     a number out of shapes: of all vertices where a whole value is computed from it,
             of the chunk's where a value of the chunk is
``WEIGHTS``  depends on parameters, but has no row per vertex
``ROWS``     a row per vertex: of the chunk's
``EDGES``    a row per edge: of those into the chunk
===========  ===========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from lightning_gpp.gnn.chunks import ChunkRows, EdgeSets
from lightning_gpp.gnn.history import History, Techniques


class NodeKind(Enum):
    """How the value of a node goes with the vertices; see the module's docstring."""

    WHOLE = "whole"
    SIZE = "size"
    WEIGHTS = "weights"
    ROWS = "rows"
    EDGES = "edges"


@dataclass
class Surroundings:
    """What all parts of a model that runs in chunks share.

    Attributes:
        num_vertices: of the graph.
        num_example: vertices of the graph that the model was captured with.
        edge_sets: lists of edges that messages are passed on.
        techniques: how histories are used.
        histories: by the way, the node that reads them and the argument.
        epoch: training passes that have begun, less one.
        fills: whether a pass over all vertices writes the histories.
    """

    num_vertices: int
    num_example: int
    edge_sets: EdgeSets
    techniques: Techniques
    histories: dict[tuple[int, str, str], History] = field(default_factory=dict)
    epoch: int = -1
    fills: bool = False

    def begin_epoch(self) -> None:
        """A training pass begins."""
        self.epoch += 1
        for history in self.histories.values():
            history.begin_epoch(self.epoch)

    @property
    def num_ways(self) -> int:
        """Parts of every chunk."""
        return self.edge_sets.chunks.num_ways

    @cached_property
    def everything(self) -> ChunkRows:
        """All vertices."""
        return self.edge_sets.chunks.one_way().rows(None)

    def history(self, key: tuple[int, str, str], like: Tensor) -> History:
        """The history of a value; made when it is first asked for."""
        if key not in self.histories:
            num_rows = len(self.edge_sets.chunks.read_by[key[0]])
            shape = (num_rows, *like.shape[1:])
            self.histories[key] = History.zeros(self.techniques, shape, like.detach())
        return self.histories[key]


@dataclass(frozen=True, slots=True)
class Pass:
    """One run over some vertices.

    Attributes:
        rows: of the vertices.
        values: of the nodes that ran, and those that were given.
        wide: of some nodes, the extended rows: with those of mirrors.
        cut: of whole values, the rows that were met, by whether they are extended.
    """

    rows: ChunkRows
    values: dict[fx.Node, Any]
    wide: dict[fx.Node, Any] = field(default_factory=dict)
    cut: dict[tuple[fx.Node, bool], Any] = field(default_factory=dict)
