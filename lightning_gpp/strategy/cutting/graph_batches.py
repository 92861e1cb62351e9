"""Batches of graphs of torch_geometric, whose samples are graphs.

A ``Batch`` is cut into micro-batches by graph, so that node offsets, batch vectors and every
attribute come out as its collate function would make them: in pieces where they are ordinary
tensors (:mod:`.graph_parts`), with torch_geometric's own functions where they are not.

torch_geometric is not imported here, as that takes a second: something can be a graph only if
the user's code has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from lightning_gpp.strategy.cutting.graph_parts import part_of

FULL_GRAPH = (
    "{place} is a single graph ({kind}), which cannot be cut into micro-batches: training on the "
    "chunks of one full graph is not there yet. Use num_microbatches=1, or give batches of many "
    "graphs (torch_geometric.loader.DataLoader)."
)


def is_graph(item: Any) -> bool:
    """Whether something is a graph or a batch of graphs."""
    module = sys.modules.get("torch_geometric.data.data")
    return module is not None and isinstance(item, module.BaseData)


def is_graph_batch(item: Any) -> bool:
    """Whether something is a batch of graphs."""
    module = sys.modules.get("torch_geometric.data.batch")
    return module is not None and isinstance(item, module.Batch)


def is_full_graph(item: Any) -> bool:
    """Whether something is one graph that is no batch."""
    return is_graph(item) and not is_graph_batch(item)


def num_graphs(item: Any) -> int:
    """Samples of a graph or of a batch of graphs."""
    return int(item.num_graphs) if is_graph_batch(item) else 1


def copy_graphs(item: Any) -> Any:
    """The same with copied tensors."""
    return item.clone()


def cut_graphs(item: Any, part: slice, place: str) -> Any:
    """The graphs of a part of a batch, as a batch.

    Raises:
        ValueError: it is one full graph.
        TypeError: the batch was not made from single graphs, so they cannot be told apart.
    """
    if is_full_graph(item):
        raise ValueError(FULL_GRAPH.format(place=place, kind=type(item).__name__))
    if not hasattr(item, "_slice_dict"):
        raise TypeError(
            f"{place} is a {type(item).__name__} that was not made from a list of graphs, so it "
            "does not know which entries belong to which graph and cannot be cut into "
            "micro-batches; make it with Batch.from_data_list or torch_geometric's DataLoader"
        )
    graphs = range(num_graphs(item))[part]
    found = part_of(item, graphs.start, graphs.stop) if graphs and graphs.step == 1 else None
    return _joined(item, graphs) if found is None else found


def repeated_graphs(item: Any, num_samples: int) -> Any:
    """So many graphs of a batch, over and over, as a batch."""
    return _joined(item, [index % num_graphs(item) for index in range(num_samples)])


def _joined(batch: Any, graphs: Sequence[int]) -> Any:
    """A batch of some of the graphs of a batch; what else followed each attribute is kept."""
    base = sys.modules["torch_geometric.data.batch"].Batch
    followed = [
        key.removesuffix("_batch")
        for key in batch.keys()  # noqa: SIM118  # no mapping
        if key.endswith("_batch") and f"{key.removesuffix('_batch')}_ptr" in batch
    ]
    return base.from_data_list(batch.index_select(list(graphs)), follow_batch=followed)
