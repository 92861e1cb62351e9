"""Bad graphs, models and numbers end before training, in an error that names the thing."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as lp
import pytest
import torch
from helpers.full_graph import (
    NodeClassifier,
    OfBatches,
    OneLayer,
    Perceptron,
    random_graph,
    refusal,
)
from helpers.workers import WorkerPool
from torch_geometric import nn as pyg
from torch_geometric.data import Batch, Data

from lightning_gpp.capture import CaptureError
from lightning_gpp.strategy import GNNPipeStrategy
from lightning_gpp.strategy.planning.example import GraphCall


def changed(**parts: Any) -> Data:
    """The usual graph with something else in it."""
    graph = random_graph()
    for name, value in parts.items():
        graph[name] = value
    return graph


CASES: list[tuple[Data, type[lp.LightningModule], dict[str, Any], str]] = [
    (
        changed(edge_index=torch.zeros(2, 0, dtype=torch.long)),
        NodeClassifier,
        {},
        "GraphTrainingError: the graph has no edges",
    ),
    (
        changed(edge_index=torch.tensor([[0, 31], [1, 2]])),
        NodeClassifier,
        {},
        "GraphTrainingError: edge_index names vertices 0 to 31, but there are 31 (0 to 30)",
    ),
    (
        Batch.from_data_list([random_graph(), random_graph()]),
        OfBatches,
        {},
        "GraphTrainingError: full-graph training needs one graph, got a batch of 2",
    ),
    (
        random_graph(),
        NodeClassifier,
        {"chunks": 32},
        "GraphTrainingError: 31 vertices make 1 to 31 chunks, got 32",
    ),
    (
        random_graph(),
        NodeClassifier,
        {"ways": 2},
        "GraphTrainingError: ways=2 has to divide the number of devices, which is 1",
    ),
    (
        random_graph(),
        Perceptron,
        {},
        "GraphTrainingError: Perceptron has no message-passing layer",
    ),
    (
        changed(train_mask=torch.ones(30, dtype=torch.bool)),
        NodeClassifier,
        {},
        "IndexError: The shape of the mask [30]",
    ),
]


@pytest.mark.parametrize(("graph", "module", "strategy", "text"), CASES)
def test_bad_input_is_named(
    pool: WorkerPool,
    graph: Data,
    module: type[lp.LightningModule],
    strategy: dict[str, Any],
    text: str,
) -> None:
    (found,) = pool.run(refusal, graph, module(), strategy, num_ranks=1)
    assert found.startswith(text)


@pytest.mark.parametrize("norm", [pyg.BatchNorm(3), pyg.GraphNorm(3), pyg.PairNorm()])
def test_layers_that_look_at_all_vertices(pool: WorkerPool, norm: torch.nn.Module) -> None:
    (found,) = pool.run(refusal, random_graph(), OneLayer(norm), {}, num_ranks=1)
    assert found.startswith("GraphTrainingError: the layer before")
    assert "mode='exact'" in found


def test_a_sparse_adjacency_is_refused() -> None:
    graph = random_graph()
    matrix = torch.eye(len(graph.x)).to_sparse()
    with pytest.raises(CaptureError, match=r"'edge_index' is a sparse tensor.* edge_weight"):
        GraphCall.of(NodeClassifier(), (graph.x, matrix), {})


def test_options_of_other_strategies() -> None:
    with pytest.raises(TypeError, match="num_microbatches"):
        GNNPipeStrategy(num_microbatches=4)
    with pytest.raises(ValueError, match="mode"):
        GNNPipeStrategy(mode="exakt")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ways must be"):
        GNNPipeStrategy(ways=0)
