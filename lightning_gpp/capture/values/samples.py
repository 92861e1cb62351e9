"""Inputs to try a captured graph on: the given one and one of another size.

Where some of them describe a batch of graphs is told by their names. torch_geometric puts the
graphs of a batch side by side into one: ``x`` holds the nodes of all of them, ``edge_index`` counts
through all nodes, ``batch`` says to which graph a node belongs. So the first dimensions of these
tensors are nodes, edges and graphs, and none of them may be cut like samples. The names are those
of torch_geometric's own convention, as ``Data.__cat_dim__`` and ``Data.__inc__`` have it: what is
called "index" counts nodes and is joined along its last dimension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

_EDGES = "edge_index"


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
        candidates = (tensors.get(f"{prefix}{name}") for name in ("batch", "x"))
        of_nodes = next((tensor for tensor in candidates if tensor is not None), None)
        if of_nodes is None or of_nodes.dim() == 0:
            return None
        if ptr is not None:  # which has the number without a look at a device
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
        kind = self.entries(name, tensor)
        if kind is None:
            return tensor
        num_more = {"nodes": 1, "edges": 2, "graphs": 0}[kind]
        return torch.cat([tensor, tensor, *[tensor[-1:]] * num_more])

    def entries(self, name: str, tensor: Tensor) -> Literal["nodes", "edges", "graphs"] | None:
        """What the first dimension of a tensor counts; None where it is nothing of the graphs."""
        if not tensor.dim():
            return None
        is_of_edges = "edge" in name
        if len(tensor) == self.num_nodes and not is_of_edges:
            return "nodes"
        if len(tensor) == self.num_graphs and not is_of_edges:
            return "graphs"
        return "edges" if is_of_edges or len(tensor) == self.num_edges else None


def _is_edge_index(name: str, tensor: Tensor) -> bool:
    is_pairs = tensor.dim() == 2 and tensor.shape[0] == 2
    return name.endswith(_EDGES) and is_pairs and not tensor.is_floating_point()


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Tensors for every graph input.

    Attributes:
        tensors: input name -> tensor.
        num_samples: size of the micro-batch.
        graphs: what the inputs are where they are a batch of graphs.
    """

    tensors: Mapping[str, Tensor]
    num_samples: int
    graphs: GraphInputs | None = None

    @property
    def device(self) -> torch.device:
        """Of the inputs."""
        return next(iter(self.tensors.values())).device

    def fresh(self) -> dict[str, Tensor]:
        """Copies, as the caller would pass them."""
        return _with_flags(self.tensors, self.tensors)

    def of(self, rows: Tensor) -> Sample:
        """Samples by their numbers."""
        chosen = {
            name: tensor.detach()[rows.to(tensor.device)]
            for name, tensor in self.tensors.items()
            if tensor.dim() and tensor.shape[0] == self.num_samples
        }
        return Sample({**self.tensors, **_with_flags(self.tensors, chosen)}, len(rows))

    def sized(self, count: int) -> Sample:
        """The first samples; where there are not so many, over and over."""
        return self.of(torch.arange(count) % self.num_samples)

    def twice(self) -> Sample:
        """Twice as many graphs, and a node."""
        assert self.graphs is not None
        tensors = self.graphs.twice_and_a_node(self.tensors)
        return Sample(_with_flags(self.tensors, tensors), 2 * self.num_samples)


def first_sample(tensors: Mapping[str, Tensor]) -> Sample:
    """The given input; its size is its number of graphs, or the most frequent first dimension."""
    if graphs := GraphInputs.find(tensors):
        return Sample(tensors, graphs.num_graphs, graphs)
    sizes = Counter(tensor.shape[0] for tensor in tensors.values() if tensor.dim())
    return Sample(tensors, sizes.most_common(1)[0][0] if sizes else 1)


def other_samples(sample: Sample) -> Iterator[Sample]:
    """Candidates for a second input: smaller, larger, and of the same size but permuted."""
    num = sample.num_samples
    if sample.graphs is not None:
        yield sample.twice()
        return
    if num >= 3:
        yield sample.sized((num + 1) // 2)
    yield sample.sized(2 * num)
    yield sample.of(torch.arange(num).roll(1))


def other_content(sample: Sample) -> Sample:
    """Inputs that differ from the given ones in number and content.

    One more sample than there are; all are the first one. Numbers become smaller, which hardly any
    forward minds; of graphs there are twice as many.
    """
    zeros = torch.zeros(sample.num_samples + 1, dtype=torch.int64)
    other = sample.of(zeros) if sample.graphs is None else sample.twice()
    scaled = {
        name: tensor.detach() * 0.75
        for name, tensor in other.tensors.items()
        if tensor.is_floating_point() or tensor.is_complex()
    }
    return replace(other, tensors={**other.tensors, **_with_flags(sample.tensors, scaled)})


def _with_flags(flagged: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Other tensors that ask for gradients where those of the same names do."""
    return {
        name: tensor.detach().clone().requires_grad_(flagged[name].requires_grad)
        for name, tensor in tensors.items()
    }
