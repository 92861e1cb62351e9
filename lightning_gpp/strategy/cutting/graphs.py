"""Batches of graphs of torch_geometric, whose samples are graphs.

The graphs of a batch lie side by side: those of a micro-batch are consecutive nodes, edges and rows
of every tensor, and what counts nodes or graphs counts from the first of them. The same holds for
the ``Batch`` that a data loader gives (:func:`cut_graphs`) and for the tensors that a forward takes
(:func:`graph_slices`, which tells them by their names as
:mod:`lightning_gpp.capture.values.graph_inputs` does).

Taking a ``Batch`` apart with torch_geometric's own functions and collating anew costs 0.05 ms per
graph, half of a short step, so that they are used only where an attribute is no ordinary tensor.

torch_geometric is not imported here, as that takes a second: something can be a graph only if
the user's code has imported it.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.capture.values.graph_inputs import GraphInputs
from lightning_gpp.common.host_copies import to_device, to_host
from lightning_gpp.runtime.pieces import Slices

_ADDED = frozenset({"batch", "ptr", "num_nodes"})
"""What torch_geometric's collate function adds to the attributes of the graphs."""


def is_graph(item: Any) -> bool:
    """Whether something is a graph or a batch of graphs."""
    module = sys.modules.get("torch_geometric.data.data")
    return module is not None and isinstance(item, module.BaseData)


def _is_batch(item: Any) -> bool:
    module = sys.modules.get("torch_geometric.data.batch")
    return module is not None and isinstance(item, module.Batch)


def num_graphs(item: Any) -> int:
    """Samples of a graph or of a batch of graphs."""
    return int(item.num_graphs) if _is_batch(item) else 1


def refuse_single_graph(item: Any, place: str) -> None:
    """Raises ValueError for a graph that is no batch of graphs."""
    if not _is_batch(item):
        raise ValueError(
            f"{place} is a single graph ({type(item).__name__}), which cannot be cut into "
            "micro-batches: training on the chunks of one full graph is not there yet. Use "
            "num_microbatches=1, or give batches of many graphs (torch_geometric's DataLoader)."
        )


def cut_graphs(item: Any, part: slice, place: str) -> Any:
    """The graphs of a part of a batch, as a batch.

    Every attribute comes out as torch_geometric's collate function would make it.

    Raises:
        ValueError: it is one full graph.
        TypeError: the batch was not made from single graphs, so they cannot be told apart.
    """
    refuse_single_graph(item, place)
    if not hasattr(item, "_slice_dict"):
        raise TypeError(
            f"{place} is a {type(item).__name__} that was not made from a list of graphs, so it "
            "does not know which entries belong to which graph and cannot be cut into "
            "micro-batches; make it with Batch.from_data_list or torch_geometric's DataLoader"
        )
    graphs = range(num_graphs(item))[part]
    found = part_of(item, graphs.start, graphs.stop) if graphs and graphs.step == 1 else None
    return _collated(item, graphs) if found is None else found


def repeated_graphs(item: Any, num_samples: int) -> Any:
    """So many graphs of a batch, over and over, as a batch."""
    return _collated(item, [index % num_graphs(item) for index in range(num_samples)])


def _collated(batch: Any, graphs: Sequence[int]) -> Any:
    """A batch of some of the graphs of a batch; what else followed each attribute is kept."""
    base = sys.modules["torch_geometric.data.batch"].Batch
    followed = [
        key.removesuffix("_batch")
        for key in batch.keys()  # noqa: SIM118  # no mapping
        if key.endswith("_batch") and f"{key.removesuffix('_batch')}_ptr" in batch
    ]
    return base.from_data_list(batch.index_select(list(graphs)), follow_batch=followed)


def part_of(batch: Any, start: int, stop: int) -> Any:
    """Graphs ``start`` to ``stop - 1`` of a batch, as collating them would make it; views.

    None where an attribute is something else than a tensor, or was not there when the batch was
    collated: then only torch_geometric knows.
    """
    increments = batch._inc_dict
    if increments is None or not all(
        _is_known(store, _table(batch._slice_dict, store)) for store in batch.stores
    ):
        return None
    part = copy.copy(batch)
    slice_dict: dict[Any, Any] = {}
    inc_dict: dict[Any, Any] = {}
    for store, old in zip(part.stores, batch.stores, strict=True):
        slices, incs = _table(batch._slice_dict, old), _table(increments, old)
        own_slices, own_incs = slice_dict, inc_dict
        if old._key is not None and slices:
            own_slices, own_incs = slice_dict.setdefault(old._key, {}), {}
            inc_dict[old._key] = own_incs
        for name, bounds in slices.items():
            dim = batch.__cat_dim__(name, old[name], old) or 0
            first, last = int(bounds[start]), int(bounds[stop])
            value, inc = old[name].narrow(dim, first, last - first), incs[name]
            if inc is not None:
                if inc[start].any():
                    value = value - inc[start].to(value.device)
                inc = inc[start:stop] - inc[start]
            store[name] = value
            own_slices[name], own_incs[name] = bounds[start : stop + 1] - bounds[start], inc
        if "ptr" in old:
            first, last = int(old["ptr"][start]), int(old["ptr"][stop])
            store["batch"] = old["batch"][first:last] - start
            store["ptr"] = old["ptr"][start : stop + 1] - first
        if "num_nodes" in old:
            store._num_nodes = old._num_nodes[start:stop]
            store.num_nodes = sum(store._num_nodes)
    part._num_graphs = stop - start
    part._slice_dict, part._inc_dict = slice_dict, inc_dict
    return part


def _table(table: Mapping[Any, Any], store: Any) -> Mapping[str, Any]:
    """What there is for each attribute of a store; stores of one kind of graph have no key."""
    found = table if store._key is None else table.get(store._key, {})
    return {name: found[name] for name in found if name in store}


def _is_known(store: Any, slices: Mapping[str, Any]) -> bool:
    """Whether all of a store are ordinary tensors of its graphs, or what collating adds."""
    if slices.keys() & _ADDED or store.keys() - slices.keys() - _ADDED:
        return False
    if ("batch" in store) != ("ptr" in store) or ("num_nodes" in store) != hasattr(
        store, "_num_nodes"
    ):
        return False
    return all(
        type(store[name]) is Tensor
        and store[name].layout is torch.strided
        and not store[name].is_nested
        and isinstance(bounds, Tensor)
        and bounds.dim() == 1
        for name, bounds in slices.items()
    )


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
    lengths = {"nodes": nodes.diff().tolist(), "edges": edges.diff().tolist(), "graphs": [*sizes]}
    return {name: _slices(graphs, name, tensor, lengths) for name, tensor in inputs.items()}


def _is_sorted(numbers: Tensor) -> Tensor:
    return (numbers[1:] >= numbers[:-1]).all()


def _first_entries(of_graph: Tensor, sizes: Sequence[int]) -> Tensor:
    """Where the entries of each piece's graphs begin, and where the last ones end."""
    first_graphs = torch.tensor([*itertools.accumulate(sizes, initial=0)], dtype=of_graph.dtype)
    return torch.searchsorted(of_graph.contiguous(), to_device(first_graphs, of_graph.device))


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
