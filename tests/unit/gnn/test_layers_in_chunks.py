"""Layers of torch_geometric on chunks of exact inputs, and what does not run in chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.utils import dropout_edge

from lightning_gpp.capture import capture
from lightning_gpp.gnn import (
    ChunkedModel,
    GraphTrainingError,
    Techniques,
    mixing_methods,
    partition,
    small_graph,
)
from lightning_gpp.gnn.check import check_in_chunks

H = 4


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(H, H), nn.ReLU(), nn.Linear(H, H))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: pyg.GCNConv(H, H),
    "gcn_reversed": lambda: pyg.GCNConv(H, H, flow="target_to_source"),
    "sage": lambda: pyg.SAGEConv(H, H),
    "sage_max": lambda: pyg.SAGEConv(H, H, aggr="max"),
    "gin": lambda: pyg.GINConv(mlp(), train_eps=True),
    "gat": lambda: pyg.GATConv(H, 2, heads=2, dropout=0.3),
    "gatv2": lambda: pyg.GATv2Conv(H, 2, heads=2),
    "gcn2": lambda: pyg.GCN2Conv(H, alpha=0.1, theta=0.5, layer=1),
    "graph": lambda: pyg.GraphConv(H, H),
    "tag": lambda: pyg.TAGConv(H, H),
    "appnp": lambda: pyg.APPNP(3, 0.1),
    "transformer": lambda: pyg.TransformerConv(H, 2, heads=2),
}
WEIGHTED = {"gcn", "gcn2", "graph", "tag"}
WITH_FEATURES: dict[str, Callable[[], nn.Module]] = {
    "gine": lambda: pyg.GINEConv(mlp(), edge_dim=2),
    "gatv2_edges": lambda: pyg.GATv2Conv(H, 2, heads=2, edge_dim=2),
}


class Stack(nn.Module):
    """Two layers with LayerNorm, dropout and a skip; what a vertex has is scaled by its degree."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        make = (LAYERS | WITH_FEATURES)[kind]
        self.stem, self.head = nn.Linear(3, H), nn.Linear(H, 2)
        self.convs = nn.ModuleList(make() for _ in range(2))
        self.norm = nn.LayerNorm(H)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor, more: Tensor) -> Tensor:
        degree = torch.zeros(len(x), dtype=x.dtype).index_add(0, edge_index[1], edge_weight)
        h = first = self.stem(F.dropout(x, 0.2, self.training)).relu()
        for conv in self.convs:
            args: list[Any] = [h, first] if self.kind == "gcn2" else [h]
            if self.kind in WEIGHTED:
                h = conv(*args, edge_index, edge_weight) + h
            elif self.kind in WITH_FEATURES:
                h = conv(*args, edge_index, more) + h
            else:
                h = conv(*args, edge_index) + h
            h = F.dropout(self.norm(h) / (1 + degree[:, None]), 0.2, self.training)
        scores: Tensor = self.head(h)
        return scores.view(x.size(0), -1)


def flags(module: nn.Module) -> dict[str, bool]:
    return {name: True for name, _ in module.named_modules()}


def checked(module: nn.Module, *args: Tensor, num_chunks: int = 3) -> ChunkedModel:
    """Checks a module in chunks, and makes it run in them."""
    captured = capture(module, args, opened=mixing_methods(module))
    tensors = captured.inputs(args, {})
    chunks = partition(args[1], len(args[0]), num_chunks)
    check_in_chunks(captured, tensors, chunks, flags(module))
    return ChunkedModel(captured, tensors, chunks, Techniques())


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Directed, with isolated vertices, loops and repeated edges; often as many as vertices."""
    num_vertices = draw(st.integers(6, 12))
    vertex = st.integers(0, num_vertices - 1)
    pairs = draw(st.lists(st.tuples(vertex, vertex), min_size=num_vertices, max_size=20))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    edges = torch.tensor(pairs).T.contiguous()

    def numbers(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5

    return numbers(num_vertices, 3), edges, numbers(len(pairs)), numbers(len(pairs), 2)


@pytest.mark.parametrize("kind", sorted(LAYERS | WITH_FEATURES))
@given(graphs())
@settings(max_examples=2, phases=[Phase.generate])  # tracing lines under a tracer takes hours
def test_a_layer_computes_the_same_in_chunks(
    kind: str, graph: tuple[Tensor, Tensor, Tensor, Tensor]
) -> None:
    torch.manual_seed(0)
    checked(Stack(kind).double(), *graph)


class Bad(nn.Module):
    """A layer that mixes vertices otherwise, between two that do not."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.stem = what, nn.Linear(3, H)
        kinds: dict[str, Any] = {
            "super": pyg.SuperGATConv,
            "stacks": partial(pyg.ARMAConv, num_stacks=2),
        }
        self.conv = kinds.get(what, pyg.GCNConv)(H, H)
        self.norm = {"batch": nn.BatchNorm1d(H), "graph": pyg.GraphNorm(H)}.get(what)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.what == "dropped":
            edge_index, _ = dropout_edge(edge_index, 0.5, training=self.training)
        h = self.stem(x)
        if self.norm is not None:
            h = self.norm(h)
        if self.what == "mean":
            h = h - h.mean(0)
        if self.what == "by_hand":
            h = h + torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])
        h = self.conv(h, edge_index)
        return h.mean(0, keepdim=True).expand(len(x), -1) if self.what == "pooled" else h


MIXED = {
    "batch": r"the layer norm \(BatchNorm1d\) computes something else in chunks.*LayerNorm",
    "graph": r"the layer norm \(GraphNorm\) computes something else in chunks",
    "mean": r"computes something else in chunks.*mode='exact', ways=1\)",
    "by_hand": "does not run on a chunk of vertices|computes something else in chunks",
    "pooled": "computes something else in chunks",
    "dropped": "draws random numbers for the graph as a whole",
    "stacks": r"\(ARMAConv\) does not run on a chunk of vertices \(IndexError",
    "super": r"\(SuperGATConv\) cannot run on chunks of vertices: .*mode='exact', ways=1\)",
}


@pytest.mark.parametrize("what", sorted(MIXED))
def test_a_model_that_mixes_vertices_otherwise_is_refused(what: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 3)
    edges = torch.randint(0, 12, (2, 40), generator=torch.Generator().manual_seed(1))
    with pytest.raises(GraphTrainingError, match=MIXED[what]):
        checked(Bad(what), x, edges)


def test_a_model_without_messages_is_refused() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            result: Tensor = self.layer(x) + edge_index.sum()
            return result

    with pytest.raises(GraphTrainingError, match="no message-passing layer"):
        checked(Plain(), torch.randn(9, 3), torch.randint(0, 9, (2, 20)))


@pytest.mark.parametrize("what", ["x", "edge_index", "edge_weight"])
def test_arguments_that_change_in_place(what: str) -> None:
    """What was computed of the graph is computed anew."""
    net, generator = Stack("gcn").eval(), torch.Generator().manual_seed(1)
    given = {
        "x": torch.randn(12, 3),
        "edge_index": torch.randint(0, 12, (2, 40), generator=generator),
        "edge_weight": torch.rand(40) + 0.1,
        "more": torch.zeros(40, 2),
    }
    captured = capture(net, tuple(given.values()), opened=mixing_methods(net))
    chunks = partition(given["edge_index"], 12, 1)
    model = ChunkedModel(captured, given, chunks, Techniques())
    names = [operator.name for operator in model.graph]
    stage = model.stage(names, list(given), model.graph.outputs)
    for _ in range(2):
        (found,) = stage(list(given.values()), 0, training=False)
        torch.testing.assert_close(found, net(*given.values()))
        given[what].copy_(given[what].flip(-1))


def test_the_whole_is_compared_with_the_module() -> None:
    """A module that changed since it was captured stands for one that capture got wrong."""
    tensors = {"x": torch.randn(400, 3), "edge_index": torch.randint(0, 400, (2, 1500))}
    module = Scaled().train()
    small = small_graph(tensors, {3, 2})
    assert small is not None
    captured = capture(module, tuple(small.values()), opened=mixing_methods(module))
    given, example = (captured.inputs(tuple(each.values()), {}) for each in (tensors, small))
    chunks = partition(tensors["edge_index"], 400, 5)
    check_in_chunks(captured, given, chunks, flags(module), example)
    module.factor = 1.01
    with pytest.raises(GraphTrainingError, match="Scaled computes something else on the whole"):
        check_in_chunks(captured, given, chunks, flags(module), example)


class Scaled(nn.Module):
    """A layer, times a number."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.factor = pyg.GCNConv(3, 2), 1.0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        scores: Tensor = self.conv(x, edge_index) * self.factor
        return scores
