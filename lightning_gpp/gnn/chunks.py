"""Chunks of vertices, and the edges that lead into each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunks:
    """The vertices of a graph, divided.

    Attributes:
        vertices: of every chunk, ascending.
        cut: edges between different chunks.
        num_edges: of the graph.
        method: how the division was found.
    """

    vertices: tuple[Tensor, ...]
    cut: int
    num_edges: int
    method: str

    @classmethod
    def of(cls, assignment: Tensor, num_chunks: int, edge_index: Tensor, method: str) -> Chunks:
        """The chunks of an assignment.

        Args:
            assignment: (vertices,) chunk of every vertex.
            num_chunks: how many there are.
            edge_index: (2, edges).
            method: how it was found.
        """
        order = torch.argsort(assignment, stable=True)
        sizes = torch.bincount(assignment, minlength=num_chunks).tolist()
        ends = assignment[edge_index.cpu()]
        cut = int((ends[0] != ends[1]).sum())
        return cls(torch.split(order, sizes), cut, edge_index.shape[1], method)

    def __len__(self) -> int:
        return len(self.vertices)

    @property
    def num_vertices(self) -> int:
        """Of all chunks."""
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """Vertices of every chunk."""
        return [len(found) for found in self.vertices]

    @cached_property
    def assignment(self) -> Tensor:
        """(vertices,) chunk of every vertex."""
        found = torch.empty(self.num_vertices, dtype=torch.long)
        for chunk, vertices in enumerate(self.vertices):
            found[vertices] = chunk
        return found

    def rows(self, order: Sequence[int]) -> Tensor:
        """(vertices,) the vertices in the order of these chunks."""
        return torch.cat([self.vertices[chunk] for chunk in order])

    def describe(self) -> str:
        """One line for people."""
        if len(self) == 1:
            return "The graph is one chunk."
        smallest, largest = min(self.sizes), max(self.sizes)
        return (
            f"{len(self)} chunks of {smallest} to {largest} vertices by {self.method}, which cut "
            f"{self.cut} of {self.num_edges} edges ({self.cut / self.num_edges:.0%})."
        )


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The vertices that a stage runs with at a time.

    Attributes:
        chunk: number of the chunk; None for all vertices.
        vertices: (rows,) ascending.
    """

    chunk: int | None
    vertices: Tensor

    def of(self, whole: Tensor) -> Tensor:
        """The rows of a tensor with one row per vertex."""
        return whole if self.chunk is None else whole.index_select(0, self.vertices)


@dataclass(frozen=True, slots=True)
class ChunkEdges:
    """The edges into the vertices of one chunk.

    Attributes:
        edges: (local edges,) which edges of the whole list they are.
        sources: (sources,) vertices that they come from, ascending, each once.
        local: (2, local edges) of positions: in ``sources``, and in the chunk.
        own: positions in ``sources`` of vertices that are in the chunk.
        own_rows: where these are in the chunk.
        others: positions in ``sources`` of vertices of other chunks.
        other_vertices: which vertices these are.
    """

    edges: Tensor
    sources: Tensor
    local: Tensor
    own: Tensor
    own_rows: Tensor
    others: Tensor
    other_vertices: Tensor


@dataclass
class EdgeSet:
    """One list of edges, cut by chunks.

    Attributes:
        edge_index: (2, edges) of vertices: sources, targets.
        chunks: by which it is cut.
    """

    edge_index: Tensor
    chunks: Chunks
    _of: dict[int, ChunkEdges] = field(default_factory=dict)

    def of(self, chunk: int) -> ChunkEdges:
        """The edges into a chunk; made once."""
        if not self._of:
            self._cut()
        return self._of[chunk]

    def _cut(self) -> None:
        source, target = self.edge_index
        device = source.device
        assignment = self.chunks.assignment.to(device)
        chunk_of_edge = assignment[target]
        order = torch.argsort(chunk_of_edge, stable=True)
        sizes = torch.bincount(chunk_of_edge, minlength=len(self.chunks)).tolist()
        position = torch.empty(self.chunks.num_vertices, dtype=torch.long, device=device)
        for chunk, edges in enumerate(torch.split(order, sizes)):
            vertices = self.chunks.vertices[chunk].to(device)
            sources, local_source = torch.unique(source[edges], return_inverse=True)
            position[vertices] = torch.arange(len(vertices), device=device)
            is_own = assignment[sources] == chunk
            own, others = is_own.nonzero().flatten(), (~is_own).nonzero().flatten()
            self._of[chunk] = ChunkEdges(
                edges=edges,
                sources=sources,
                local=torch.stack([local_source, position[target[edges]]]),
                own=own,
                own_rows=position[sources[own]],
                others=others,
                other_vertices=sources[others],
            )


@dataclass
class EdgeSets:
    """All lists of edges that a model passes messages on; equal ones are one."""

    chunks: Chunks
    known: list[EdgeSet] = field(default_factory=list)

    def find(self, edge_index: Tensor) -> EdgeSet:
        """The set of a list of edges (sources, targets)."""
        for found in self.known:
            if found.edge_index is edge_index or (
                found.edge_index.shape == edge_index.shape
                and torch.equal(found.edge_index, edge_index)
            ):
                return found
        self.known.append(EdgeSet(edge_index, self.chunks))
        return self.known[-1]
