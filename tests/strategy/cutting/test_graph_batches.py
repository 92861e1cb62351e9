"""Batches of graphs are cut by graph, one full graph not at all; training equals one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.reference import weight_differences
from helpers.training import Recording, Result, make_trainer, quiet, real_tensors
from helpers.workers import WorkerError, WorkerPool
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

pytest.importorskip("torch_geometric")
from torch_geometric.data import Batch, Data
from torch_geometric.nn import PairNorm

from lightning_gpp.recipes.gnn import GraphNetwork, Motifs
from lightning_gpp.strategy.cutting.microbatches import (
    batch_size,
    cut_batch,
    resized_batch,
)


def graph(num_nodes: int) -> Data:
    edges = torch.randint(0, num_nodes, (2, 2 * num_nodes))
    x, y = torch.randn(num_nodes, 2), torch.randn(1, 3)
    return Data(x=x, edge_index=edges, y=y, note=f"{num_nodes} nodes", count=num_nodes)


@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4))
def test_cut_then_joined_is_the_batch(parts: list[list[int]]) -> None:
    whole = Batch.from_data_list([graph(size) for part in parts for size in part])
    labels = torch.arange(whole.num_graphs)
    batch = {"graphs": whole, "labels": labels}
    assert batch_size(batch) == len(labels)
    pieces = cut_batch(batch, [len(part) for part in parts])
    for piece, part in zip(pieces, parts, strict=True):
        assert piece["graphs"].count.tolist() == part
        assert piece["graphs"].edge_index.max() < sum(part)
        assert len(piece["labels"]) == len(part)
    graphs = [one for piece in pieces for one in piece["graphs"].to_data_list()]
    again = Batch.from_data_list(graphs)
    for key in ("x", "edge_index", "y", "batch", "ptr", "count"):
        assert torch.equal(again[key], whole[key]), key
    assert again.note == whole.note


def test_one_full_graph_counts_as_one_sample() -> None:
    batch = {"graph": graph(4)}
    assert batch_size(batch) == 1
    with pytest.raises(ValueError, match="use num_microbatches=1"):
        cut_batch(batch, [1, 0])


def test_a_batch_made_by_hand_is_refused() -> None:
    batch = Batch(x=torch.ones(4, 1), batch=torch.tensor([0, 0, 1, 1]))
    with pytest.raises(TypeError, match=r"Batch\.from_data_list"):
        cut_batch(batch, [1, 1])


class NodeLoss(GraphNetwork):
    """Its loss is a mean over nodes, not over graphs."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        out = self(batch)[batch.batch]
        loss = torch.nn.functional.cross_entropy(out, batch.y[batch.batch])
        self.log("train_loss", loss, batch_size=batch.num_graphs)
        return loss


def fit_graphs(
    options: dict[str, Any],
    strategy: dict[str, Any] | None,
    num_ranks: int = 1,
    kind: type[GraphNetwork] = GraphNetwork,
) -> Result:
    """Ten steps on 36 graphs in batches of 16: every third has four."""
    result = Result()
    torch.manual_seed(5)
    data = Motifs(num_graphs=48, batch_size=16, validation_fraction=0.25)
    module = kind.for_data(data, width=8, depth=3, **options)
    with quiet():
        trainer = make_trainer(
            strategy, num_ranks, max_steps=10, precision="64-true", callbacks=[Recording(result)]
        )
        trainer.fit(module, datamodule=data)
    result.weights = real_tensors(module)
    result.final_metrics = {n: float(v) for n, v in trainer.callback_metrics.items()}
    return result


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("layer", "num_ranks", "schedule"),
    [("gcn", 2, "1f1b"), ("gcn2", 3, "gpipe"), ("gat", 4, "1f1b"), ("sage", 2, "gpipe")],
)
def test_equals_one_device(pool: WorkerPool, layer: str, num_ranks: int, schedule: str) -> None:
    expected = fit_graphs({"layer": layer}, None)
    strategy = {"num_microbatches": 4, "schedule": schedule, "timeout": 100.0}
    results = pool.run(fit_graphs, {"layer": layer}, strategy, num_ranks, num_ranks=num_ranks)
    assert set(expected.final_metrics) >= {"val_loss", "val_acc"}
    assert_same_results(results, expected, 1e-8)


def test_a_mean_over_nodes(pool: WorkerPool) -> None:
    strategy = {"num_microbatches": 4, "timeout": 100.0}
    results = pool.run(fit_graphs, {}, strategy, 2, num_ranks=2, kind=NodeLoss)
    assert_same_results(results, fit_graphs({}, None, kind=NodeLoss), 1e-8)


def assert_same_results(results: list[Result], expected: Result, tolerance: float) -> None:
    assert not weight_differences(results[0].weights, expected.weights, 1e-9)
    for result in results:
        assert result.losses == pytest.approx(expected.losses, rel=tolerance)
        assert result.final_metrics == pytest.approx(expected.final_metrics, rel=tolerance)


class Paired(GraphNetwork):
    """Centres and scales the nodes of all graphs together, and is one operator there."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.norms = torch.nn.ModuleList(PairNorm() for _ in self.norms)


def test_graphs_that_meet_are_not_cut(pool: WorkerPool) -> None:
    options = {"num_microbatches": 2, "timeout": 100.0}
    (result,) = pool.run(fit_graphs, {}, options, 1, Paired, num_ranks=1)
    assert_same_results([result], fit_graphs({}, None, 1, Paired), 1e-8)
    with pytest.raises(WorkerError, match="of a sample depends on the other samples of its batch"):
        pool.run(fit_graphs, {}, options | {"schedule": "1f1b"}, 1, Paired, num_ranks=1)


class NodeClasses(GraphNetwork):
    """A class per node of one full graph; some nodes are for training, the others for validation.

    The graph as a whole is the one sample.
    """

    def forward(self, batch: Data) -> torch.Tensor:
        h = self.stem(batch.x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            h = h + conv(norm(h), batch.edge_index).relu()
        out: torch.Tensor = self.head(h)
        return out

    def training_step(self, batch: Data, batch_idx: int) -> torch.Tensor:
        loss = self.loss(self(batch)[batch.train_mask], batch.y[batch.train_mask])
        self.log("train_loss", loss, batch_size=1)
        return loss

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        rest = ~batch.train_mask
        self.log("val_loss", self.loss(self(batch)[rest], batch.y[rest]), batch_size=1)


class Changing(Dataset):
    """A graph that some epochs find with other edges or features, changed in place."""

    def __init__(self, data: Data) -> None:
        self.data, self.reads = data, 0

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Data:
        self.reads += 1
        if self.reads == 3:
            self.data.edge_index = self.data.edge_index.flip(1)[:, 5:]
        if self.reads % 4 == 0:
            self.data.x.numpy()[0] += 1.0
        return self.data


def fit_full_graph(
    strategy: dict[str, Any] | None, num_ranks: int = 1, changes: bool = False
) -> Result:
    """Five epochs of one step on a graph of 30 nodes."""
    result = Result()
    torch.manual_seed(2)
    data = graph(30)
    data.x, data.y = data.x.double(), torch.randint(0, 3, (30,))
    data.train_mask = torch.arange(30) % 3 != 0
    module = NodeClasses(2, 3, layer="gcn", depth=3, width=8).double()
    kept: Any = Changing(data) if changes else [data]
    loader = DataLoader(kept, batch_size=None)
    with quiet():
        trainer = make_trainer(
            strategy, num_ranks, max_epochs=5, precision="64-true", callbacks=[Recording(result)]
        )
        trainer.fit(module, loader, loader)
    result.weights = real_tensors(module)
    result.final_metrics = {n: float(v) for n, v in trainer.callback_metrics.items()}
    return result


@pytest.mark.parametrize(
    "strategy", [{}, {"num_microbatches": 4}, {"num_microbatches": 1, "schedule": "1f1b"}], ids=str
)
def test_one_full_graph_in_one_piece_equals_one_device(
    pool: WorkerPool, strategy: dict[str, Any]
) -> None:
    expected = fit_full_graph(None)
    plan = [["stem", "norms.0", "convs.0"], ["norms.1", "convs.1", "norms.2", "convs.2", "head"]]
    strategy = strategy | {"plan": plan, "timeout": 100.0}
    results = pool.run(fit_full_graph, strategy, 2, num_ranks=2)
    assert set(expected.final_metrics) == {"train_loss", "val_loss"}
    assert expected.losses[-1] < expected.losses[0]
    assert_same_results(results, expected, 1e-9)
    held = [result.own_parameters for result in results]
    assert all(held)
    assert not held[0] & held[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_graph_that_changes_equals_one_device(pool: WorkerPool, schedule: str) -> None:
    """Stages keep the graph, but never an old one."""
    expected = fit_full_graph(None, changes=True)
    plan = [["stem", "norms.0", "convs.0"], ["norms.1", "convs.1", "norms.2", "convs.2", "head"]]
    strategy = {"plan": plan, "timeout": 100.0, "schedule": schedule, "num_microbatches": 1}
    results = pool.run(fit_full_graph, strategy, 2, True, num_ranks=2)
    assert_same_results(results, expected, 1e-9)
    unchanged = fit_full_graph(None)
    assert weight_differences(unchanged.weights, expected.weights, 1e-3)


def test_batches_of_other_sizes_have_the_first_graphs_over_and_over() -> None:
    graphs = [Data(x=torch.full((nodes, 1), float(nodes))) for nodes in (1, 2, 3)]
    batch = {"graphs": Batch.from_data_list(graphs), "y": torch.arange(3)}
    for num_samples in (2, 5):
        found = resized_batch(batch, num_samples)
        assert batch_size(found) == num_samples
        sizes = torch.bincount(found["graphs"].batch).tolist()
        assert sizes == [1, 2, 3, 1, 2][:num_samples]
        assert found["y"].tolist() == [0, 1, 2, 0, 1][:num_samples]
