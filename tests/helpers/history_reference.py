"""Historical embeddings and gradients, written from their definitions for one process.

GNNPipe (arXiv 2308.10087): chunk by chunk, with dense adjacency matrices, and one autograd graph
for the whole epoch. A row that was computed before in the same epoch is read as it is, with its
gradient times a factor; one that was not is a constant from the history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch_geometric.nn.conv.gcn_conv import gcn_norm

FLOWS = ("target_to_source", "source_to_target")


class Net(nn.Module):
    """A layer in front, some message-passing layers, a layer behind.

    :class:`Reference` knows the first three kinds.
    """

    def __init__(self, kind: str, num_layers: int, width: int = 6, num_classes: int = 3) -> None:
        super().__init__()
        from torch_geometric import nn as pyg

        makers: dict[str, Callable[[int], nn.Module]] = {
            "gcn": lambda _: pyg.GCNConv(width, width),
            "both_ways": lambda i: pyg.GCNConv(width, width, flow=FLOWS[i % 2]),
            "sage": lambda _: pyg.SAGEConv(width, width),
            "gcn2": lambda i: pyg.GCN2Conv(width, alpha=0.1, theta=0.5, layer=i + 1),
            "gin": lambda _: pyg.GINConv(nn.Linear(width, width), train_eps=True),
            "gat": lambda _: pyg.GATv2Conv(width, width // 2, heads=2),
            "resgcn": lambda _: _Residual(width),
        }
        self.kind = kind
        self.stem, self.head = nn.Linear(5, width), nn.Linear(width, num_classes)
        self.convs = nn.ModuleList(makers[kind](i) for i in range(num_layers))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Scores of every vertex."""
        h = first = self.stem(x).relu()
        for conv in self.convs:
            more = conv(h, first, edge_index) if self.kind == "gcn2" else conv(h, edge_index)
            h = more.relu() + h
        scores: Tensor = self.head(h)
        return scores


class _Residual(nn.Module):
    """A layer of ResGCN+ (arXiv 2006.07739)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        from torch_geometric import nn as pyg

        self.norm, self.conv = nn.LayerNorm(width), pyg.SAGEConv(width, width)

    def forward(self, h: Tensor, edge_index: Tensor) -> Tensor:
        """What the layer adds."""
        more: Tensor = self.conv(self.norm(h).relu(), edge_index)
        return more


def dense(kind: str, edge_index: Tensor, num_vertices: int) -> Tensor:
    """(targets, sources) what a layer multiplies rows by, in float64."""
    matrix = torch.zeros(num_vertices, num_vertices, dtype=torch.float64)
    if kind == "sage":
        matrix.index_put_((edge_index[1], edge_index[0]), torch.ones(1).double(), accumulate=True)
        return matrix / matrix.sum(1, keepdim=True).clamp(min=1)
    edges, weights = gcn_norm(edge_index, None, num_vertices, dtype=matrix.dtype)
    return matrix.index_put_((edges[1], edges[0]), weights, accumulate=True)


@dataclass
class Reference:
    """Trains a :class:`Net` chunk by chunk.

    Attributes:
        net: whose parameters get gradients.
        adjacency: of :func:`dense`.
        vertices: of every chunk.
        refresh_every: epochs for which stale values stay.
        historical_gradients: whether gradients of the epoch before are used; without, those that
            are there count twice.
    """

    net: Net
    adjacency: Tensor
    vertices: Sequence[Tensor]
    refresh_every: int = 23
    historical_gradients: bool = False
    epoch: int = 0
    stale: dict[int, Tensor] = field(default_factory=dict)
    last: dict[int, Tensor] = field(default_factory=dict)
    given: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def run(self, x: Tensor, order: Sequence[int], loss: Callable[[Tensor], Tensor]) -> Tensor:
        """One epoch: gradients of all parameters; the scores of all vertices."""
        if self.epoch % self.refresh_every == 0:
            self.stale = dict(self.last)
        read: dict[tuple[int, int], Tensor] = {}
        fresh: dict[int, dict[int, Tensor]] = {i: {} for i in range(len(self.net.convs))}
        extra = x.new_zeros(())
        scores = x.new_zeros(len(x), self.net.head.out_features)
        for chunk in order:
            rows = self.vertices[chunk]
            h = first = self.net.stem(x[rows]).relu()
            for i, conv in enumerate(self.net.convs):
                own = conv.lin(h) if self.net.kind == "gcn" else h
                around = self.around(i, chunk, own, fresh[i])
                if around.requires_grad:
                    around.retain_grad()
                read[i, chunk] = around
                if self.historical_gradients:
                    for other in fresh[i]:  # their backward comes after this one's
                        if (i, other) in self.given:
                            extra = extra + (own * self.given[i, other][rows]).sum()
                fresh[i][chunk] = own
                h = self.after(conv, self.adjacency[rows] @ around, h, first).relu() + h
            scores = scores.index_copy(0, rows, self.net.head(h))
        (loss(scores) + extra).backward()
        for (i, chunk), around in read.items():
            assert around.grad is not None
            self.given[i, chunk] = around.grad.detach().clone()
        self.last = {i: self.assembled(found) for i, found in fresh.items()}
        self.epoch += 1
        return scores.detach()

    def around(self, layer: int, chunk: int, own: Tensor, fresh: dict[int, Tensor]) -> Tensor:
        """(vertices, width) what the edges of a chunk come from."""
        factor = 1.0 if self.historical_gradients else 2.0
        stale = self.stale.get(layer)
        zeros = own.new_zeros(len(self.adjacency), own.shape[1])
        found = zeros if stale is None else stale.clone()
        for other, value in fresh.items():
            counted = factor * value - (factor - 1) * value.detach()
            found = found.index_copy(0, self.vertices[other], counted)
        return found.index_copy(0, self.vertices[chunk], own)

    def assembled(self, values: dict[int, Tensor]) -> Tensor:
        """The rows of all chunks together."""
        like = next(iter(values.values()))
        found = like.new_zeros(len(self.adjacency), like.shape[1])
        for chunk, value in values.items():
            found[self.vertices[chunk]] = value.detach()
        return found

    def after(self, conv: nn.Module, gathered: Tensor, h: Tensor, first: Tensor) -> Tensor:
        """What a layer makes of what it gathered."""
        if self.net.kind == "gcn":
            return gathered + conv.bias
        if self.net.kind == "sage":
            result: Tensor = conv.lin_l(gathered) + conv.lin_r(h)
            return result
        mixed = (1 - conv.alpha) * gathered + conv.alpha * first
        return (1 - conv.beta) * mixed + conv.beta * (mixed @ conv.weight1)
