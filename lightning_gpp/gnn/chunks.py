"""Chunks of vertices, their parts, and the edges into each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_gpp.common.tensor_places import num_changes
from lightning_gpp.common.units_of_measure import percent_text
from lightning_gpp.graph.graph_parallel import VertexShares

REMEDY = (
    "give GNNPipeStrategy(mode='exact', ways=1), which runs every layer on the whole graph, or use "
    "another layer (LayerNorm in the place of BatchNorm or GraphNorm)"
)
"""What to do about a layer that computes something else on chunks of vertices."""


class GraphTrainingError(ValueError):
    """The graph or the model does not fit chunked training; the text names what, and a remedy."""


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The vertices that one way runs at a time.

    Attributes:
        chunk: number of the chunk; None for all vertices.
        way: the way that holds them. The ways run their parts of one chunk side by side.
        is_alone: whether they read no vertex of another chunk.
        vertices: (rows,) of the part, ascending.
        extended: (rows + mirrors,) the same, and those of the other ways' parts of this chunk whose
            rows the way reads, way by way.
        places: (rows + mirrors,) where the histories of the way have the rows of ``extended``.
        sent: way -> (mirrors,) which of ``vertices`` that way reads.
    """

    chunk: int | None
    way: int
    is_alone: bool
    vertices: Tensor
    extended: Tensor
    places: Tensor
    sent: Mapping[int, Tensor]

    def of(self, whole: Tensor, *, wide: bool = False) -> Tensor:
        """A copy of the rows of a tensor with one row per vertex.

        Args:
            whole: (vertices, ...).
            wide: whether those of mirrors are among them.
        """
        return whole.index_select(0, self.extended if wide else self.vertices)

    def on(self, device: torch.device) -> ChunkRows:
        """The same with their tensors on a device."""
        if self.vertices.device == device:
            return self
        tensors = (self.vertices, self.extended, self.places, self.sent)
        moved = pytree.tree_map_only(Tensor, lambda each: each.to(device), tensors)
        return ChunkRows(self.chunk, self.way, self.is_alone, *moved)

    def narrow(self, wide: Any) -> Any:
        """Of the extended rows of a value's tensors those of the part."""
        count = len(self.vertices)
        return pytree.tree_map_only(Tensor, lambda each: each.narrow(0, 0, count), wide)

    @property
    def is_everything(self) -> bool:
        """Whether these are all vertices of the graph, in their order."""
        return self.chunk is None and not self.sent


@dataclass(frozen=True)
class Chunks:
    """The vertices of a graph, divided into chunks, and these into parts, one per way.

    Attributes:
        part_of: (vertices,) part of every vertex: those of a way follow one another, by chunks.
        num_chunks: number of chunks.
        num_ways: number of parts of every chunk.
        mirrors: (way, reader) -> vertices of a way that edges lead from into another's, ascending.
        cut: edges between different parts.
        num_edges: of the graph.
        method: how the division was found.
    """

    part_of: Tensor
    num_chunks: int
    num_ways: int
    mirrors: Mapping[tuple[int, int], Tensor]
    cut: int
    num_edges: int
    method: str

    @classmethod
    def of(
        cls,
        part_of: Tensor,
        num_chunks: int,
        edge_index: Tensor,
        method: str,
        num_ways: int = 1,
    ) -> Chunks:
        """The chunks of an assignment; see the attributes.

        Args:
            part_of: (vertices,) part of every vertex.
            num_chunks: how many there are.
            edge_index: (2, edges) from sources to targets.
            method: how it was found.
            num_ways: parts of every chunk.
        """
        source, target = part_of[edge_index.cpu()]
        num_cut, num_edges = int((source != target).sum()), edge_index.shape[1]
        chunks = cls(part_of, num_chunks, num_ways, {}, num_cut, num_edges, method)
        return chunks.with_mirrors([edge_index])

    def with_mirrors(self, edge_lists: Sequence[Tensor]) -> Chunks:
        """The same division, where ways exchange what messages along some edges need.

        Args:
            edge_lists: (2, edges) each, from sources to targets.
        """
        if self.num_ways == 1:
            return replace(self, mirrors={})
        ways, count = self.num_ways, self.num_vertices
        keys = []
        for edges in edge_lists:
            source, target = edges.cpu()
            way, reader = self.way_of[source], self.way_of[target]
            crossing = way != reader
            keys.append(((way * ways + reader) * count + source)[crossing])
        found = torch.unique(torch.cat(keys))  # sorted by the pair, then by the vertex
        sizes = torch.bincount(found // count, minlength=ways**2).tolist()
        parts = torch.split(found % count, sizes)
        pairs = [(way, reader) for way in range(ways) for reader in range(ways)]
        mirrors = {
            pair: part.clone()  # of its own, so that a message has no more
            for pair, part in zip(pairs, parts, strict=True)
            if pair[0] != pair[1]
        }
        return replace(self, mirrors=mirrors)

    def __len__(self) -> int:
        return self.num_chunks

    @property
    def num_vertices(self) -> int:
        """Number of vertices in all chunks."""
        return len(self.part_of)

    @cached_property
    def sizes(self) -> list[int]:
        """Vertices of every chunk."""
        found: list[int] = torch.bincount(self.assignment, minlength=len(self)).tolist()
        return found

    @property
    def shares(self) -> VertexShares:
        """Vertices of the ways, and of their mirrors."""
        rows = torch.bincount(self.way_of, minlength=self.num_ways).tolist()
        return VertexShares(rows, {ends: len(found) for ends, found in self.mirrors.items()})

    @cached_property
    def assignment(self) -> Tensor:
        """(vertices,) chunk of every vertex."""
        return self.part_of % self.num_chunks

    @cached_property
    def way_of(self) -> Tensor:
        """(vertices,) way of every vertex."""
        return self.part_of // self.num_chunks

    @cached_property
    def vertices(self) -> tuple[Tensor, ...]:
        """Vertices of every chunk, way by way."""
        order = torch.argsort(self.one_way().part_of, stable=True)
        return torch.split(order, self.sizes)

    def order_of(self, chunks: Sequence[int]) -> Tensor:
        """(vertices,) the vertices in the order of some chunks."""
        return torch.cat([self.vertices[chunk] for chunk in chunks])

    def rows(self, chunk: int | None, way: int = 0) -> ChunkRows:
        """The vertices of a way's part of a chunk; all of the way for None."""
        is_own = self.way_of == way
        if chunk is not None:
            is_own = self.part_of == way * len(self) + chunk
        vertices = is_own.nonzero().flatten()
        others = [other for other in range(self.num_ways) if other != way]
        mirrored = (self._mirrored(other, way, chunk) for other in others)
        extended = torch.cat([vertices, *mirrored])
        sent = {
            other: torch.searchsorted(vertices, self._mirrored(way, other, chunk))
            for other in others
        }
        is_alone, places = chunk is None or len(self) == 1, self.places(way, extended)
        return ChunkRows(chunk, way, is_alone, vertices, extended, places, sent)

    @cached_property
    def read_by(self) -> list[Tensor]:
        """The vertices whose rows a way has or reads, ascending, way by way."""
        found = []
        for way in range(self.num_ways):
            own = (self.way_of == way).nonzero().flatten()
            read = (rows for (_, reader), rows in self.mirrors.items() if reader == way)
            found.append(torch.unique(torch.cat([own, *read])))
        return found

    def places(self, way: int, vertices: Tensor) -> Tensor:
        """Positions in a way's histories of the vertices that it has or reads."""
        if self.num_ways == 1:
            return vertices
        return torch.searchsorted(self.read_by[way].to(vertices.device), vertices)

    def one_way(self) -> Chunks:
        """The same division where every part is a chunk."""
        part_of = self.assignment * self.num_ways + self.way_of
        num_parts = len(self) * self.num_ways
        return replace(self, part_of=part_of, num_chunks=num_parts, num_ways=1, mirrors={})

    def _mirrored(self, way: int, reader: int, chunk: int | None) -> Tensor:
        found = self.mirrors[way, reader]
        return found if chunk is None else found[self.assignment[found] == chunk]

    def describe(self) -> str:
        """One line for people."""
        if len(self) == 1 and self.num_ways == 1:
            return "The graph is one chunk."
        sizes = torch.bincount(self.part_of).tolist()
        what = f"{len(self)} chunks" if len(self) > 1 else "One chunk"
        what += f" of {self.num_ways} parts" if self.num_ways > 1 else ""
        return (
            f"{what}, {min(sizes)} to {max(sizes)} vertices {'each ' * (self.num_ways > 1)}by "
            f"{self.method}, which cut {self.cut} of {self.num_edges} edges "
            f"({percent_text(self.cut, self.num_edges)})."
        )


@dataclass(frozen=True, slots=True)
class ChunkEdges:
    """The edges into a part of a chunk.

    Attributes:
        edges: (local edges,) which edges of the whole list they are.
        sources: (sources,) vertices that they come from, ascending, each once.
        local: (2, local edges) of positions: in ``sources``, and in the part.
        own: positions in ``sources`` of vertices that are in the chunk.
        own_rows: where these are in the extended rows of the part.
        others: positions in ``sources`` of vertices of other chunks.
        places: where the histories of the way have the rows of the sources.
    """

    edges: Tensor
    sources: Tensor
    local: Tensor
    own: Tensor
    own_rows: Tensor
    others: Tensor
    places: Tensor


class Remembered:
    """A tensor and its version, to notice later changes."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._num_changes = tensor, num_changes(tensor)

    def is_that_of(self, tensor: Tensor) -> bool:
        """Whether a tensor holds what this one did, on the same device.

        Of two that are equal the new one is remembered: chunks of one step have it in common, and
        on a GPU every comparison makes the host wait.
        """
        known = self.tensor
        if num_changes(known) != self._num_changes:
            return False
        kinds = [(each.shape, each.dtype, each.device) for each in (known, tensor)]
        memory = [(each.data_ptr(), each.stride()) for each in (known, tensor)]
        if kinds[0] != kinds[1] or (memory[0] != memory[1] and not torch.equal(known, tensor)):
            return False
        self.tensor, self._num_changes = tensor, num_changes(tensor)
        return True


class EdgeSet:
    """One list of edges, cut by the parts of the chunks.

    Args:
        edge_index: (2, edges) of vertices: sources, targets.
        chunks: by which it is cut.
    """

    def __init__(self, edge_index: Tensor, chunks: Chunks) -> None:
        self.edges, self.chunks = Remembered(edge_index), chunks
        self._of: dict[tuple[int | None, int], ChunkEdges] = {}

    def of(self, rows: ChunkRows) -> ChunkEdges:
        """The edges into a part; all parts are cut at once.

        Raises:
            GraphTrainingError: an edge leads from a vertex of another way that is no mirror.
        """
        key = rows.chunk, rows.way
        if key not in self._of:
            self._cut([None] if rows.chunk is None else range(len(self.chunks)))
        return self._of[key]

    def _cut(self, numbers: Sequence[int | None]) -> None:
        """Cuts the edges for all chunks, or for all vertices of the ways."""
        source, target = self.edges.tensor
        chunks, device = self.chunks, source.device
        keys = [(chunk, way) for way in range(chunks.num_ways) for chunk in numbers]
        part_of = chunks.way_of if numbers[0] is None else chunks.part_of
        part_of_edge = part_of.to(device)[target]
        order = torch.argsort(part_of_edge, stable=True)
        sizes = torch.bincount(part_of_edge, minlength=len(keys)).tolist()
        position = torch.full((chunks.num_vertices,), -1, dtype=torch.long, device=device)
        for (chunk, way), edges in zip(keys, torch.split(order, sizes), strict=True):
            rows = chunks.rows(chunk, way)
            extended = rows.extended.to(device)
            sources, local_source = torch.unique(source[edges], return_inverse=True)
            position[extended] = torch.arange(len(extended), device=device)
            found = position[sources]
            own, others = (found >= 0).nonzero().flatten(), (found < 0).nonzero().flatten()
            self._check(sources[others], rows)
            self._of[chunk, way] = ChunkEdges(
                edges=edges,
                sources=sources,
                local=torch.stack([local_source, position[target[edges]]]),
                own=own,
                own_rows=found[own],
                others=others,
                places=chunks.places(way, sources),
            )
            position[extended] = -1

    def _check(self, others: Tensor, rows: ChunkRows) -> None:
        """Checks that what is read of other chunks belongs to the way or is mirrored there."""
        if self.chunks.num_ways == 1 or not len(others):
            return
        if rows.is_alone or not bool(torch.isin(others.cpu(), self.chunks.read_by[rows.way]).all()):
            raise GraphTrainingError(
                "a layer passes messages along edges that it did not have when the graph was "
                "divided, so its devices lack rows that it reads; use ways=1"
            )
