"""Graphs of torch_geometric (``Data`` and ``Batch``) as containers of tensors.

A forward may take a whole ``Data`` object. Its tensors become inputs of the captured graph, so only
tensors travel between stages, and every forward gets an object of the same class made of its own
tensors. What depends on the number of graphs or nodes (``num_graphs``, ``num_nodes``) is then
computed from those tensors, as torch_geometric itself does where nothing was noted down.

torch_geometric is not imported here: a value can be such a graph only if someone else did.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

_KEPT = (Tensor, bool, int, float, str)


def is_graph_type(kind: type | None) -> bool:
    """Whether a class is ``torch_geometric.data.Data`` or derived from it (``Batch`` is)."""
    module = sys.modules.get("torch_geometric.data.data")
    return module is not None and kind is not None and issubclass(kind, module.Data)


def is_opaque_graph(value: Any) -> bool:
    """Whether a value is a graph of a kind that is not taken apart (``HeteroData``)."""
    module = sys.modules.get("torch_geometric.data.data")
    return module is not None and isinstance(value, module.BaseData | module.GraphStore)


def attributes_of(graph: Any) -> dict[str, Any]:
    """The attributes of a graph that belong to a captured forward, by name.

    Tensors, and numbers and strings that hold for the whole batch. Lists with an item per graph
    (the names of molecules) are left out, as is a ``num_nodes`` that node features or a batch
    vector tell.
    """
    found = {key: graph[key] for key in sorted(graph.keys())}  # they come in no fixed order
    kept = {key: value for key, value in found.items() if isinstance(value, _KEPT)}
    if any(isinstance(found.get(key), Tensor) for key in ("x", "pos", "batch")):
        kept.pop("num_nodes", None)
    return kept


def make_graph(kind: type, attributes: Mapping[str, Any]) -> Any:
    """A graph of the given class with these attributes."""
    # Calling the class of a batch (DataBatch) would make one of a class derived from it instead.
    graph: Any = type.__call__(kind)
    for key, value in attributes.items():
        graph[key] = value
    return graph
