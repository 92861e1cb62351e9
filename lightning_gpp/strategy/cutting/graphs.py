"""Cuts batches of torch_geometric, whose samples are graphs.

The graphs of a batch lie side by side: those of a micro-batch are consecutive nodes, edges and rows
of every tensor, and what counts nodes or graphs counts from the first of them. The same holds for
the ``Batch`` that a data loader gives (:func:`some_graphs`) and for the tensors of a forward
(:func:`graph_slices`, which tells them by their names as
:mod:`lightning_gpp.capture.values.samples` does).

torch_geometric is not imported here, as that takes a second: something can be a graph only if
the user's code has imported it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.capture.values.samples import GraphInputs
from lightning_gpp.common.host_copies import to_device, to_host
from lightning_gpp.runtime.pieces import Slices


def _is_batch(item: Any) -> bool:
    module = sys.modules.get("torch_geometric.data.batch")
    return module is not None and isinstance(item, module.Batch)


def num_graphs(item: Any) -> int:
    """Samples of a graph or of a batch of graphs."""
    return int(item.num_graphs) if _is_batch(item) else 1


def some_graphs(item: Any, chosen: slice | Sequence[int], place: str) -> Any:
    """Some graphs of a batch, by number, as torch_geometric's collate function makes a batch.

    Raises:
        ValueError: it is one full graph.
        TypeError: the batch was not made from single graphs, so they cannot be told apart.
    """
    if not _is_batch(item):
        raise ValueError(
            f"{place} is a single graph ({type(item).__name__}), which cannot be cut into "
            "micro-batches: use num_microbatches=1, or give batches of many graphs "
            "(torch_geometric's DataLoader)."
        )
    if not hasattr(item, "_slice_dict"):
        raise TypeError(
            f"{place} is a {type(item).__name__} that was not made from a list of graphs, so it "
            "cannot be cut. Make it with Batch.from_data_list or torch_geometric's DataLoader"
        )
    followed = [
        key.removesuffix("_batch")
        for key in item.keys()  # noqa: SIM118  # no mapping
        if key.endswith("_batch") and f"{key.removesuffix('_batch')}_ptr" in item
    ]
    numbers = range(num_graphs(item))[chosen] if isinstance(chosen, slice) else chosen
    base = sys.modules["torch_geometric.data.batch"].Batch
    return base.from_data_list(item.index_select(list(numbers)), follow_batch=followed)


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
    first_graphs = torch.tensor([*itertools.accumulate(sizes, initial=0)], dtype=of_nodes.dtype)
    first_graphs = to_device(first_graphs, of_nodes.device)
    columns = (of_nodes.contiguous(), of_edges.contiguous())
    *are_sorted, nodes, edges = to_host(
        [
            *((numbers[1:] >= numbers[:-1]).all() for numbers in columns),
            *(torch.searchsorted(numbers, first_graphs) for numbers in columns),
        ]
    )
    if not all(are_sorted):
        return None
    lengths = {"nodes": nodes.diff().tolist(), "edges": edges.diff().tolist(), "graphs": [*sizes]}
    return {name: _slices(graphs, name, tensor, lengths) for name, tensor in inputs.items()}


def _slices(
    graphs: GraphInputs, name: str, tensor: Tensor, lengths: Mapping[str, Sequence[int]]
) -> Slices:
    """How one tensor is cut; ``lengths``: nodes, edges and graphs of each piece."""
    firsts = {
        kind: tuple(itertools.accumulate(counts[:-1], initial=0))
        for kind, counts in lengths.items()
    }
    if name == f"{graphs.prefix}ptr":
        return Slices(0, tuple(lengths["graphs"]), firsts["nodes"], overlap=1)
    if name == f"{graphs.prefix}batch":
        return Slices(0, tuple(lengths["nodes"]), firsts["graphs"])
    if "index" in name and not tensor.is_floating_point() and tensor.dim():
        return Slices(tensor.dim() - 1, tuple(lengths["edges"]), firsts["nodes"])
    kind = graphs.entries(name, tensor)
    return Slices(None) if kind is None else Slices(0, tuple(lengths[kind]))
