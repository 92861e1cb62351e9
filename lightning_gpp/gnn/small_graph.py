"""A small graph in the place of a large one, to capture a model with.

What a model does with a graph does not depend on the size of the graph, while looking at it means
to run it a dozen times, with all that it keeps for a backward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from lightning_gpp.capture.values.samples import GraphInputs

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
