"""Stacks of torch_geometric's layers, its ready-made models, and forwards that take a ``Data``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipelined import assert_partitions_exact, run_module, run_stages
from torch import Tensor, nn

pyg = pytest.importorskip("torch_geometric.nn")
from torch_geometric.data import Batch, Data  # noqa: E402

from lightning_gpp.capture import (  # noqa: E402
    CapturedModel,
    CaptureError,
    capture,
)
from lightning_gpp.capture.checks.check import compare  # noqa: E402
from lightning_gpp.graph import Variation  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error")


def graphs(sizes: tuple[int, ...] = (4, 3, 5), seed: int = 0, **more: Any) -> Batch:
    """Random graphs of given numbers of nodes, with an edge weight and two edge features."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for size in sizes:
        edges = torch.randint(0, size, (2, 2 * size), generator=generator)
        graph = Data(
            x=torch.randn(size, 3, generator=generator),
            edge_index=edges,
            edge_weight=torch.rand(2 * size, generator=generator) + 0.5,
            edge_attr=torch.randn(2 * size, 2, generator=generator),
            y=torch.randn(1, 2, generator=generator),
            **more,
        )
        made.append(graph)
    return Batch.from_data_list(made)


def assert_same_on_other_sizes(captured: CapturedModel, arguments: Callable[[Batch], Any]) -> None:
    """Outputs and gradients on batches of other numbers of graphs, nodes and edges."""
    names = [operator.name for operator in captured.graph]
    stages = [names[: len(names) // 2], names[len(names) // 2 :]] if len(names) > 1 else [names]
    for sizes in ((6,), (2, 7, 3, 4, 5)):
        for mode in (True, False):
            captured.module.train(mode)
            args = arguments(graphs(sizes, seed=len(sizes)))
            torch.manual_seed(3)
            expected = run_module(captured.module, args, {})
            torch.manual_seed(3)
            compare(expected, run_stages(captured, stages, args, {}), f"{sizes}, training={mode}")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


CONVS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: pyg.GCNConv(4, 4),
    "sage": lambda: pyg.SAGEConv(4, 4),
    "gin": lambda: pyg.GINConv(mlp(), train_eps=True),
    "gine": lambda: pyg.GINEConv(mlp(), edge_dim=2),
    "gat": lambda: pyg.GATConv(4, 2, heads=2, dropout=0.2),
    "gat_edges": lambda: pyg.GATConv(4, 4, edge_dim=2),
    "gcn2": lambda: pyg.GCN2Conv(4, alpha=0.1, theta=0.5, layer=1),
}


class Stack(nn.Module):
    """Two layers by hand, with a norm, dropout, a skip and pooling; takes a ``Data``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.stem, self.head = nn.Linear(3, 4), nn.Linear(8, 2)
        self.convs = nn.ModuleList(CONVS[kind]() for _ in range(2))
        self.norms = nn.ModuleList([pyg.BatchNorm(4), pyg.GraphNorm(4)])
        self.pool = pyg.global_mean_pool

    def layer(self, conv: nn.Module, h: Tensor, stem: Tensor, data: Data) -> Tensor:
        if self.kind == "gcn2":
            return conv(h, stem, data.edge_index, data.edge_weight)
        if self.kind in ("gine", "gat_edges"):
            return conv(h, data.edge_index, edge_attr=data.edge_attr)
        if self.kind == "gcn":
            return conv(h, data.edge_index, data.edge_weight)
        return conv(h, data.edge_index)

    def forward(self, data: Data) -> Tensor:
        h = stem = self.stem(data.x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            normed = norm(h, data.batch) if "Graph" in type(norm).__name__ else norm(h)
            changed = self.layer(conv, normed, stem, data)
            h = h + F.dropout(changed.relu(), 0.3, self.training)
        pooled = [self.pool(h, data.batch), pyg.global_add_pool(h, data.batch, data.num_graphs)]
        return self.head(torch.cat(pooled, dim=1))


@pytest.mark.parametrize("kind", CONVS)
def test_stacks_by_hand_on_a_data_object(kind: str) -> None:
    # In float64: gradients of attention nearly cancel out, so rounding is large beside them.
    batch = graphs().apply(lambda item: item.double() if item.is_floating_point() else item)
    module = Stack(kind).double()
    captured = assert_partitions_exact(module, batch, in_order=True, num_partitions=3)
    operators = [operator.name for operator in captured.graph]
    assert {"convs_0", "convs_1", "norms_1", "global_mean_pool", "head"} <= set(operators)
    assert len(operators) <= 16
    captured = capture(Stack(kind), (graphs(),))  # in float32, where rounding is told from faults
    assert_same_on_other_sizes(captured, lambda batch: (batch,))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GIN", "GAT"])
@pytest.mark.parametrize("jk", [None, "cat", "max", "lstm"])
def test_ready_made_models_are_opened(name: str, jk: str | None) -> None:
    options = {"norm": "layer_norm", "dropout": 0.2, "jk": jk}
    module = getattr(pyg, name)(3, 4, num_layers=3, out_channels=2, **options)

    def arguments(batch: Batch) -> tuple[Any, ...]:
        return (batch.x, batch.edge_index, None, None, batch.batch, None)

    captured = assert_partitions_exact(
        module, *arguments(graphs()), in_order=True, num_partitions=2
    )
    assert {"convs_0", "convs_1", "convs_2"} <= {operator.name for operator in captured.graph}
    assert_same_on_other_sizes(captured, arguments)


class Pooled(nn.Module):
    """Tensors as arguments, all poolings, edge weights, an activation in between."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = pyg.GCNConv(3, 4), nn.Linear(12, 1)
        self.jump = pyg.JumpingKnowledge("cat")
        self.pools = {"max": pyg.global_max_pool}

    def forward(
        self, x: Tensor, edge_index: Tensor, batch: Tensor, edge_weight: Tensor | None = None
    ) -> Tensor:
        h = self.conv(x, edge_index, edge_weight).tanh()
        both = self.jump([h, h * h])
        pooled = pyg.global_mean_pool(both, batch)
        return self.head(torch.cat([pooled, self.pools["max"](h, batch)], dim=1))


@pytest.mark.parametrize("with_weights", [False, True])
def test_tensors_as_arguments(with_weights: bool) -> None:
    def arguments(batch: Batch) -> tuple[Tensor, ...]:
        first = (batch.x, batch.edge_index, batch.batch)
        return (*first, batch.edge_weight) if with_weights else first

    captured = assert_partitions_exact(Pooled(), *arguments(graphs()), num_partitions=3)
    assert captured.takes_graphs
    assert_same_on_other_sizes(captured, arguments)


def test_nodes_and_edges_are_no_samples() -> None:
    """All graphs are equally large, so that nodes and edges would grow like the graphs."""
    batch = graphs((4, 4, 4))
    captured = capture(Pooled(), (batch.x, batch.edge_index, batch.batch))
    values = captured.graph.values
    assert values["conv"].tensors[0].batch_dim is None
    assert values["head"].tensors[0].batch_dim == 0


class Sizes(nn.Module):
    """Reads sizes of the graphs instead of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Linear(3, 4), pyg.SAGEConv(4, 2)

    def forward(self, data: Data) -> Tensor:
        h = self.conv(self.stem(data.x), data.edge_index)
        per_graph = h.new_zeros(data.num_graphs, 2).index_add(0, data.batch, h)
        return per_graph * data.num_nodes / (data.num_edges + data.num_graphs)


def test_sizes_of_a_data_object_are_computed_anew() -> None:
    captured = assert_partitions_exact(Sizes(), graphs(), num_partitions=2)
    assert_same_on_other_sizes(captured, lambda batch: (batch,))


def test_one_full_graph() -> None:
    class Nodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = pyg.GCNConv(3, 4), pyg.GCNConv(4, 2)

        def forward(self, data: Data) -> Tensor:
            return self.b(self.a(data.x, data.edge_index).relu(), data.edge_index)

    graph = graphs((9,))[0]
    captured = assert_partitions_exact(Nodes(), graph, num_partitions=2)
    assert [operator.name for operator in captured.graph] == ["a", "relu", "b"]


def test_hetero_data_is_refused_with_a_remedy() -> None:
    from torch_geometric.data import HeteroData

    data = HeteroData()
    data["a"].x = torch.ones(3, 2)

    class Takes(nn.Module):
        def forward(self, data: HeteroData, x: Tensor) -> Tensor:
            return x * data["a"].x.sum()

    with pytest.raises(CaptureError, match="Pass its tensors as separate arguments"):
        capture(Takes(), (data, torch.ones(3, 2, requires_grad=True)))


class LayerAndPool(nn.Module):
    """A layer over the nodes, and a row per graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, batch: Batch) -> Tensor:
        return pyg.global_mean_pool(self.layer(batch.x), batch.batch, batch.num_graphs)


def test_a_batch_of_graphs_is_not_taken_for_a_value_without_samples() -> None:
    """Replicas would each get, and compute, all graphs."""
    graph = capture(LayerAndPool(), (graphs(),), {}).graph
    read = {graph.values[name] for operator in graph for name in operator.inputs}
    assert read
    assert {value.variation for value in read} == {Variation.WHOLE}


AGGREGATIONS: dict[str, Callable[[], nn.Module]] = {
    "mean": pyg.MeanAggregation,
    "softmax": lambda: pyg.SoftmaxAggregation(learn=True),
    "attention": lambda: pyg.AttentionalAggregation(nn.Linear(6, 1)),
    "several": lambda: pyg.MultiAggregation(["mean", "max"]),
}


class ReadOut(nn.Module):
    """An aggregation that reads the number of graphs out of the batch, before its own forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv, self.pool = pyg.GCNConv(3, 6), AGGREGATIONS[kind]()
        self.out = nn.Linear(12 if kind == "several" else 6, 2)

    def forward(self, graph: Data) -> Tensor:
        x = self.conv(graph.x, graph.edge_index).relu()
        return self.out(self.pool(x, graph.batch))


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_aggregations_as_read_outs(kind: str) -> None:
    captured = capture(ReadOut(kind), (graphs(),))
    assert "pool" in [operator.name for operator in captured.graph]
    assert_same_on_other_sizes(captured, lambda batch: (batch,))
