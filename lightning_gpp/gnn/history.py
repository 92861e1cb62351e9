"""Histories: values of vertices whose chunks were not computed yet, and their gradients.

GNNPipe (arXiv 2308.10087, section 3; the paper numbers three training techniques):

1. the order of the chunks is drawn anew every epoch,
2. the stale values that layers read stay the same for some epochs,
3. gradients are not taken from history; instead those that a vertex gets from chunks whose backward
   came before count twice, as a chunk has come before with probability one half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from lightning_gpp.common.checks import check_whole
from lightning_gpp.gnn.chunks import ChunkEdges, ChunkRows, Chunks, EdgeSet

REFRESH_EVERY = 23
"""Epochs from one refresh of the histories to the next, as in the paper's experiments."""

UNBIASED = 2.0
"""By what gradients from chunks that came before are multiplied: one over their probability."""


@dataclass(frozen=True, slots=True)
class Techniques:
    """How histories are used; numbers as in the paper.

    Attributes:
        shuffle: whether the order of the chunks is drawn anew every epoch (technique 1).
        refresh_every: epochs for which stale values stay the same (technique 2); with 1 they are
            always those of the epoch before.
        historical_gradients: whether vertices get the gradients of the epoch before from chunks
            whose backward comes later. Without (technique 3), those that are there count
            :data:`UNBIASED` times.
    """

    shuffle: bool = True
    refresh_every: int = REFRESH_EVERY
    historical_gradients: bool = False

    def __post_init__(self) -> None:
        check_whole("refresh_every", self.refresh_every)


@dataclass
class History:
    """The history of one value that one layer reads.

    Attributes:
        techniques: how it is used.
        values: (vertices of the way and of its mirrors, ...) what layers read: of this epoch where
            it is computed, else stale.
        gradients: (likewise, ...) what other chunks gave to vertices in this epoch's backward.
    """

    techniques: Techniques
    values: Tensor
    gradients: Tensor
    _stale: Tensor
    _given: dict[int | None, Tensor] = field(default_factory=dict)

    @classmethod
    def zeros(cls, techniques: Techniques, shape: Sequence[int], like: Tensor) -> History:
        """One that begins with zeros, as published."""
        values, gradients, stale = (like.new_zeros(tuple(shape)) for _ in range(3))
        return cls(techniques, values, gradients, stale)

    @property
    def size_bytes(self) -> int:
        """Bytes of the history."""
        return sum(each.nbytes for each in (self.values, self.gradients, self._stale))

    def begin_epoch(self, epoch: int) -> None:
        """Refreshes the stale values, or puts them back; epochs are counted from 0."""
        if epoch % self.techniques.refresh_every == 0:
            self._stale.copy_(self.values)
        else:
            self.values.copy_(self._stale)
        if not self.techniques.historical_gradients:
            self.gradients.zero_()

    def take(self, rows: ChunkRows, own: Tensor) -> None:
        """Takes the extended rows of a chunk."""
        self.values.index_copy_(0, rows.places, own.detach())

    def give(self, rows: ChunkRows, edges: ChunkEdges, gradient: Tensor) -> None:
        """Adds what the backward of a chunk gives to vertices of other chunks.

        Args:
            rows: of the chunk.
            edges: into it.
            gradient: of the rows of the sources.
        """
        given, places = gradient.index_select(0, edges.others), edges.places[edges.others]
        if not self.techniques.historical_gradients:
            self.gradients.index_add_(0, places, given, alpha=UNBIASED)
            return
        last = self._given.get(rows.chunk)
        change = given if last is None else given - last
        self.gradients.index_add_(0, places, change)
        self._given[rows.chunk] = given


def exchanged(own: Tensor, history: History, rows: ChunkRows, edges: ChunkEdges) -> Tensor:
    """The rows that a chunk's edges read: its own, and those of other chunks out of the history.

    Gradients of its own rows flow back together with those that other chunks have given to them.

    Args:
        own: (extended rows, ...) of the chunk, which the history takes.
        history: of this value.
        rows: of the chunk.
        edges: into it.

    Returns:
        (sources, ...).
    """
    result: Tensor = _Exchange.apply(own, history, rows, edges)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    """See :func:`exchanged`."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, history: History, rows: ChunkRows, edges: ChunkEdges
    ) -> Tensor:
        ctx.history, ctx.rows, ctx.edges = history, rows, edges
        history.take(rows, own)
        return history.values.index_select(0, edges.places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        history, rows, edges = ctx.history, ctx.rows, ctx.edges
        own = history.gradients.index_select(0, rows.places)
        own.index_add_(0, edges.own_rows, gradient.index_select(0, edges.own))
        history.give(rows, edges, gradient)
        return own, None, None, None


@dataclass
class Surroundings:
    """What all parts of a chunked model share.

    Attributes:
        chunks: of the vertices.
        num_example: vertices of the graph that the model was captured with.
        techniques: how histories are used.
        edge_sets: lists of edges that messages are passed on and somebody has; equal ones are one.
        histories: by the way, the node that reads them and the argument.
        epoch: training passes that have begun, less one.
        fills: whether a pass over all vertices writes the histories.
    """

    chunks: Chunks
    num_example: int
    techniques: Techniques
    edge_sets: WeakSet[EdgeSet] = field(default_factory=WeakSet)
    histories: dict[tuple[int, str, str], History] = field(default_factory=dict)
    epoch: int = -1
    fills: bool = False

    def edge_set(self, edge_index: Tensor) -> EdgeSet:
        """The set of a list of edges (sources, targets)."""
        for known in self.edge_sets:
            if known.edges.is_that_of(edge_index):
                return known
        new = EdgeSet(edge_index, self.chunks)
        self.edge_sets.add(new)
        return new

    def mirror(self) -> None:
        """From now on ways exchange what messages along all known edges need."""
        edges = [known.edges.tensor for known in self.edge_sets]
        self.chunks = self.chunks.with_mirrors(edges)
        for known in self.edge_sets:
            known.chunks = self.chunks

    @cached_property
    def everything(self) -> ChunkRows:
        """All vertices."""
        return self.chunks.one_way().rows(None)

    def history(self, key: tuple[int, str, str], like: Tensor) -> History:
        """The history of a value; made when it is first asked for."""
        if key not in self.histories:
            shape = (len(self.chunks.read_by[key[0]]), *like.shape[1:])
            self.histories[key] = History.zeros(self.techniques, shape, like.detach())
        return self.histories[key]
