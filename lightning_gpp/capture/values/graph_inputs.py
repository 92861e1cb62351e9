"""Which inputs of a forward describe a batch of graphs, told by their names.

torch_geometric puts the graphs of a batch side by side into one: ``x`` holds the nodes of all of
them, ``edge_index`` counts through all nodes, ``batch`` says to which graph a node belongs. So the
first dimensions of these tensors are nodes, edges and graphs, and none of them may be cut like
samples. The names are those of torch_geometric's own convention, as ``Data.__cat_dim__`` and
``Data.__inc__`` have it: what is called "index" counts nodes and is joined along its last
dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_EDGES = "edge_index"
_VERTICES = "vertices"  # of a sparse adjacency


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """The sizes of a batch of graphs, and what its tensors are called.

    Attributes:
        prefix: of the names (``"data_"`` for the argument ``data``).
        num_nodes: of all graphs.
        num_edges: likewise.
        num_graphs: of the batch; 1 where there is no batch vector.
        is_batch: whether something says to which graph a node belongs; otherwise all belong to one.
    """

    prefix: str
    num_nodes: int
    num_edges: int
    num_graphs: int
    is_batch: bool

    @classmethod
    def find(cls, tensors: Mapping[str, Tensor]) -> GraphInputs | None:
        """The batch of graphs among some inputs by name; None if there is none, or several."""
        names = [name for name, tensor in tensors.items() if _is_edge_index(name, tensor)]
        if len(names) != 1:
            return None
        prefix = names[0].removesuffix(_EDGES)
        batch, ptr = tensors.get(f"{prefix}batch"), tensors.get(f"{prefix}ptr")
        candidates = (tensors.get(f"{prefix}{name}") for name in ("batch", "x", _VERTICES))
        of_nodes = next((tensor for tensor in candidates if tensor is not None), None)
        if of_nodes is None or of_nodes.dim() == 0:
            return None
        if ptr is not None:
            num_graphs = ptr.numel() - 1
        else:
            num_graphs = 1 if batch is None else int(batch.max()) + 1 if len(batch) else 0
        is_batch = batch is not None or ptr is not None
        return cls(prefix, len(of_nodes), tensors[names[0]].shape[1], num_graphs, is_batch)

    def twice_and_a_node(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The graphs, the same again, and in the last graph one more node, linked to another one.

        So the number of graphs doubles while those of nodes and edges do not, and each grows in its
        own way: one can tell which dimension is which. The two new edges lead there and back; about
        loops and repeated edges layers do not agree where they take a sparse adjacency.
        """
        return {name: self._doubled(name, tensor) for name, tensor in tensors.items()}

    def _doubled(self, name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if name == f"{self.prefix}ptr":
            more = tensor[1:] + self.num_nodes
            more[-1] += 1
            return torch.cat([tensor, more])
        if name == f"{self.prefix}batch":
            last = tensor.new_tensor([2 * self.num_graphs - 1])
            return torch.cat([tensor, tensor + self.num_graphs, last])
        if "index" in name and not tensor.is_floating_point() and tensor.dim():
            more = torch.full((*tensor.shape[:-1], 2), 2 * self.num_nodes).to(tensor)
            if more.shape[:-1] == (2,):
                more.fill_diagonal_(2 * self.num_nodes - 1)
            return torch.cat([tensor, tensor + self.num_nodes, more], dim=-1)
        match self.entries(name, tensor):
            case "nodes":
                return torch.cat([tensor, tensor, tensor[-1:]])
            case "edges":
                return torch.cat([tensor, tensor, tensor[-1:], tensor[-1:]])
            case "graphs":
                return torch.cat([tensor, tensor])
        return tensor

    def entries(self, name: str, tensor: Tensor) -> Literal["nodes", "edges", "graphs"] | None:
        """What the first dimension of a tensor counts; None where it is nothing of the graphs."""
        if not tensor.dim():
            return None
        if name == f"{self.prefix}{_VERTICES}":
            return "nodes"
        if "edge" in name:
            return "edges"
        if len(tensor) == self.num_nodes:
            return "nodes"
        if len(tensor) == self.num_graphs:
            return "graphs"
        return "edges" if len(tensor) == self.num_edges else None


def _is_edge_index(name: str, tensor: Tensor) -> bool:
    is_pairs = tensor.dim() == 2 and tensor.shape[0] == 2
    return name.endswith(_EDGES) and is_pairs and not tensor.is_floating_point()
