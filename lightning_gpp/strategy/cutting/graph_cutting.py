"""Cutting the arguments of a forward that takes a batch of graphs of torch_geometric, by graph.

The graphs lie side by side: those of a micro-batch are consecutive nodes, edges and rows of every
tensor, and what counts nodes or graphs counts from the first of them. Which tensor holds what is
told as :mod:`lightning_gpp.capture.values.graph_inputs` does.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_gpp.capture.values.graph_inputs import GraphInputs
from lightning_gpp.host_copies import to_device, to_host
from lightning_gpp.strategy.cutting.slices import Slices


def graph_slices(inputs: Mapping[str, Tensor], sizes: Sequence[int]) -> dict[str, Slices] | None:
    """How the arguments are cut into pieces of so many graphs; None where they cannot be.

    They cannot without a vector that says to which graph a node belongs, or where nodes or edges
    are not in the order of the graphs.

    Args:
        inputs: the arguments by name.
        sizes: graphs of each piece.

    Shapes:
        - ``batch``: (number of nodes,), ``edge_index``: (2, number of edges)
    """
    graphs = GraphInputs.find(inputs)
    if graphs is None or graphs.num_graphs != sum(sizes):
        return None
    of_nodes = inputs.get(f"{graphs.prefix}batch")
    if of_nodes is None:
        return None
    of_edges = of_nodes[inputs[f"{graphs.prefix}edge_index"][0]]
    columns = (of_nodes, of_edges)
    *are_sorted, nodes, edges = to_host(
        [*map(_is_sorted, columns), *(_first_entries(column, sizes) for column in columns)]
    )
    if not all(are_sorted):
        return None
    found = _Layout(graphs, sizes, nodes.diff().tolist(), edges.diff().tolist())
    return {name: found.slices(name, tensor) for name, tensor in inputs.items()}


def _is_sorted(numbers: Tensor) -> Tensor:
    return (numbers[1:] >= numbers[:-1]).all()


def _first_entries(of_graph: Tensor, sizes: Sequence[int]) -> Tensor:
    """Where the entries of each piece's graphs begin, and where the last ones end."""
    first_graphs = torch.tensor([*itertools.accumulate(sizes, initial=0)], dtype=of_graph.dtype)
    return torch.searchsorted(of_graph.contiguous(), to_device(first_graphs, of_graph.device))


class _Layout:
    """Where the nodes and edges of each piece are."""

    def __init__(
        self, graphs: GraphInputs, sizes: Sequence[int], nodes: list[int], edges: list[int]
    ) -> None:
        self._graphs, self._sizes, self._nodes, self._edges = graphs, list(sizes), nodes, edges
        self._first_node = tuple(itertools.accumulate(nodes[:-1], initial=0))
        self._first_graph = tuple(itertools.accumulate(sizes[:-1], initial=0))

    def slices(self, name: str, tensor: Tensor) -> Slices:
        prefix = self._graphs.prefix
        if name == f"{prefix}ptr":
            return Slices(0, tuple(self._sizes), self._first_node, overlap=1)
        if name == f"{prefix}batch":
            return Slices(0, tuple(self._nodes), self._first_graph)
        if "index" in name and not tensor.is_floating_point() and tensor.dim():
            return Slices(tensor.dim() - 1, tuple(self._edges), self._first_node)
        kind = self._graphs.entries(name, tensor)
        lengths = {"nodes": self._nodes, "edges": self._edges, "graphs": self._sizes}
        return Slices(None if kind is None else 0, tuple(lengths[kind]) if kind else ())
