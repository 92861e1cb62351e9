"""Divides the vertices of a graph into chunks with few edges between them.

METIS does it where its Python package ``pymetis`` is installed. Without it the vertices are put in
reverse Cuthill-McKee order (neighbours get close numbers) and cut into equal runs.

A model is captured with a small graph in the place of a large one: what it does with a graph does
not depend on the size, while looking at it means to run it a dozen times, with all that it keeps
for a backward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_gpp.capture.values.samples import GraphInputs
from lightning_gpp.gnn.chunks import Chunks, GraphTrainingError

METIS = "METIS"
ORDERING = "reverse Cuthill-McKee order (pymetis is not installed)"

_Ints = npt.NDArray[np.int64]


def partition(
    edge_index: Tensor, num_vertices: int, num_chunks: int, seed: int = 0, num_ways: int = 1
) -> Chunks:
    """Divides the vertices of a graph.

    Args:
        edge_index: (2, edges) of vertices; directions, loops and repetitions do not matter.
        num_vertices: of the graph.
        num_chunks: to divide them into; each gets a vertex at least.
        seed: of METIS.
        num_ways: parts to divide each chunk into.

    Raises:
        GraphTrainingError: there are no edges, or they name vertices that do not exist, or there
            are more parts than vertices.
    """
    num_parts = num_chunks * num_ways
    check_edges(edge_index, num_vertices)
    if not 1 <= num_parts <= num_vertices:
        raise GraphTrainingError(
            f"{num_vertices} vertices make 1 to {num_vertices} chunks, got {num_parts} (of all "
            "ways together); set chunks= accordingly"
        )
    if num_parts == 1:
        return Chunks.of(torch.zeros(num_vertices, dtype=torch.long), 1, edge_index, "one chunk")
    adjacency = _adjacency(edge_index, num_vertices)
    if find_spec("pymetis") is not None:
        parts, method = _metis(adjacency, num_parts, seed), METIS
    else:
        parts, method = _ordered(adjacency, num_parts), ORDERING
    assignment = torch.from_numpy(_without_empty(parts, num_parts))
    return Chunks.of(assignment, num_chunks, edge_index, method, num_ways)


def check_edges(edge_index: Tensor, num_vertices: int) -> None:
    """Checks that edges are some, and of vertices that there are.

    Args:
        edge_index: (2, edges).
        num_vertices: of the graph.

    Raises:
        GraphTrainingError: they are not.
    """
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.is_floating_point():
        raise GraphTrainingError(
            f"edge_index has to hold whole numbers of shape (2, edges), got {edge_index.dtype} of "
            f"shape {tuple(edge_index.shape)}"
        )
    if not edge_index.shape[1]:
        raise GraphTrainingError("the graph has no edges, so there is nothing to pass messages on")
    low, high = int(edge_index.min()), int(edge_index.max())
    if low < 0 or high >= num_vertices:
        raise GraphTrainingError(
            f"edge_index names vertices {low} to {high}, but there are {num_vertices} (0 to "
            f"{num_vertices - 1})"
        )


def _adjacency(edge_index: Tensor, num_vertices: int) -> Any:
    """Neighbours in both directions, each once and without the vertex itself, as a CSR matrix."""
    from scipy.sparse import csr_array

    edges = edge_index.cpu().long().numpy()
    ends = np.concatenate([edges, edges[::-1]], axis=1)
    ends = ends[:, ends[0] != ends[1]]
    return csr_array((np.ones(ends.shape[1], bool), (ends[0], ends[1])), (num_vertices,) * 2)


def _metis(adjacency: Any, num_chunks: int, seed: int) -> _Ints:
    import pymetis

    kind = pymetis.zero_copy_dtype()
    found = pymetis.part_graph(
        num_chunks,
        adjacency=pymetis.CSRAdjacency(
            adjacency.indptr.astype(kind), adjacency.indices.astype(kind)
        ),
        options=pymetis.Options(seed=seed),
    )
    return np.asarray(found.vertex_part, dtype=np.int64)


def _ordered(adjacency: Any, num_chunks: int) -> _Ints:
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    order = reverse_cuthill_mckee(adjacency, symmetric_mode=True)
    count = len(order)
    parts = np.empty(count, dtype=np.int64)
    parts[order] = np.arange(count) * num_chunks // count
    return parts


def _without_empty(parts: _Ints, num_chunks: int) -> _Ints:
    """The same parts, where those that got no vertex take one of the largest's."""
    counts = np.bincount(parts, minlength=num_chunks)
    for empty in np.flatnonzero(counts == 0):
        largest = int(counts.argmax())
        parts[np.flatnonzero(parts == largest)[-1]] = empty
        counts[largest] -= 1
        counts[empty] = 1
    return parts


SIZES = (127, 131, 137, 139, 149, 151, 157, 163)
"""Vertices of the small graph: the first number that is no size of anything else in the model."""

NUM_EDGES = 60
"""Edges of it, at most: they have fewer ends than there are vertices."""


def small_graph(
    tensors: Mapping[str, Tensor], other_sizes: Collection[int]
) -> dict[str, Tensor] | None:
    """Some edges of a graph, the vertices at their ends, and others.

    Args:
        tensors: arguments that are one graph, by name.
        other_sizes: sizes of parameters.

    Returns:
        The arguments with this graph; None where the graph itself is as small, or its arguments
        are not told apart.
    """
    graph = GraphInputs.find(tensors)
    if graph is None or graph.num_nodes <= 2 * SIZES[-1] or graph.num_edges <= 2 * NUM_EDGES:
        return None
    taken = {*other_sizes, *(size for t in tensors.values() for size in t.shape[1:])}
    count = next((size for size in SIZES if size not in taken), None)
    edges = tensors[f"{graph.prefix}edge_index"]
    if count is None or graph.num_nodes == graph.num_edges:
        return None
    chosen = torch.arange(NUM_EDGES) * (graph.num_edges // NUM_EDGES)
    ends = edges.cpu()[:, chosen]
    vertices = torch.unique(torch.cat([ends.flatten(), torch.arange(count)]))[
        : 2 * NUM_EDGES + count
    ]
    is_end = torch.isin(vertices, ends)
    vertices = torch.cat([vertices[is_end], vertices[~is_end]])[:count].sort().values
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        where = graph.entries(name, tensor)
        if tensor is edges:
            found[name] = torch.searchsorted(vertices, ends).to(edges)
        elif where == "nodes":
            found[name] = tensor[vertices.to(tensor.device)]
        elif where == "edges" and len(tensor) == graph.num_edges:
            found[name] = tensor[chosen.to(tensor.device)]
        else:
            found[name] = tensor
    return found
