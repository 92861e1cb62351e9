"""Full-graph training over processes: exact, and as historical embeddings are defined."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.full_graph import (
    FullGraphJob,
    NodeClassifier,
    fit,
    random_graph,
    sent_bytes,
)
from helpers.history_reference import Reference, dense
from helpers.workers import WorkerPool
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_gpp.gnn import Techniques, partition
from lightning_gpp.strategy.settings import FullGraph
from lightning_gpp.strategy.step.forward_calls import chunk_order

SEED = 7


def merged(results: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The weights of all ranks."""
    return {name: w for result in results for name, w in result["weights"].items()}


def trained_by_definition(
    job: FullGraphJob, num_chunks: int, techniques: Techniques, ways: int = 1
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Scores of every epoch and the weights, by the reference."""
    module, graph = job.module().double(), random_graph(**job.graph)
    num_vertices = graph.num_nodes
    chunks = partition(graph.edge_index, num_vertices, num_chunks, SEED, ways)
    adjacency = dense(module.net.kind, graph.edge_index, num_vertices)
    reference = Reference(
        module.net,
        adjacency,
        chunks.vertices,
        techniques.refresh_every,
        techniques.historical_gradients,
    )
    optimizer = module.configure_optimizers()
    asked = FullGraph(num_chunks, techniques, seed=SEED)

    def loss(scores: Tensor) -> Tensor:
        return F.cross_entropy(scores[graph.train_mask], graph.y[graph.train_mask])

    scores = []
    for epoch in range(job.epochs):
        optimizer.zero_grad()
        order = chunk_order(asked, chunks, epoch)
        scores.append(reference.run(graph.x, order, loss))
        optimizer.step()
    return scores, {name: p.detach() for name, p in module.named_parameters()}


EXACT = [
    *(("gcn", *places) for places in [(2, 1), (3, 1), (3, 3)]),
    *((kind, 2, 2) for kind in ["both_ways", "sage", "gcn2", "gin", "gat", "resgcn"]),
    *((kind, 4, 2) for kind in ["gcn2", "gat", "resgcn"]),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "num_ranks", "ways"), EXACT)
def test_exact_mode_equals_one_device(
    pool: WorkerPool, kind: str, num_ranks: int, ways: int
) -> None:
    """Layers over devices, vertices over devices (graph parallelism), and both."""
    job = FullGraphJob(partial(NodeClassifier, kind), epochs=6)
    expected = fit(job, None)
    strategy = {"mode": "exact", "ways": ways, "seed": SEED}
    results = pool.run(fit, job, strategy, num_ranks, num_ranks=num_ranks)
    weights = merged(results)
    assert weights.keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-9, atol=1e-9)
    assert results[0]["metrics"] == pytest.approx(expected["metrics"], rel=1e-9)


@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    kind=st.sampled_from(["gcn", "sage", "gin", "gat", "gcn2", "resgcn"]),
    places=st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)]),
    num_vertices=st.integers(4, 40),
    edges_per_vertex=st.floats(0.2, 4),
    seed=st.integers(0, 1000),
)
def test_exact_mode_on_random_graphs(
    pool: WorkerPool,
    kind: str,
    places: tuple[int, int],
    num_vertices: int,
    edges_per_vertex: float,
    seed: int,
) -> None:
    """Few edges leave ways without any, many vertices alone, and ways without training ones."""
    num_ranks, ways = places
    num_edges = max(1, round(num_vertices * edges_per_vertex))
    graph = {"num_vertices": num_vertices, "num_edges": num_edges, "seed": seed}
    job = FullGraphJob(partial(NodeClassifier, kind), graph, epochs=4)
    expected = fit(job, None)
    strategy = {"mode": "exact", "ways": ways, "seed": seed}
    results = pool.run(fit, job, strategy, num_ranks, num_ranks=num_ranks)
    for name, weight in merged(results).items():
        torch.testing.assert_close(weight, expected["weights"][name], rtol=1e-9, atol=1e-9)


LARGE = {"num_vertices": 350, "num_edges": 1200}
"""A graph that is captured by a small one in its place."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["gcn", "gin", "gat", "resgcn"])
def test_a_graph_that_is_not_captured_itself(pool: WorkerPool, kind: str) -> None:
    """Exact as above, on a graph of other sizes than the one that capture saw."""
    job = FullGraphJob(partial(NodeClassifier, kind), LARGE, epochs=5)
    expected = fit(job, None)
    strategy = {"mode": "exact", "ways": 2, "seed": SEED}
    results = pool.run(fit, job, strategy, 2, num_ranks=2)
    weights = merged(results)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-9, atol=1e-9)
    assert results[0]["metrics"] == pytest.approx(expected["metrics"], rel=1e-9)


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(("kind", "ways"), [("gcn2", 1), ("gat", 2)])
def test_mixed_precision(pool: WorkerPool, kind: str, ways: int) -> None:
    """Exact mode within the rounding of bfloat16; histories within that of exact arithmetic."""
    job = FullGraphJob(partial(NodeClassifier, kind), epochs=5, precision="bf16-mixed")
    exact = {"mode": "exact", "ways": ways, "seed": SEED}
    chunks = {"chunks": 3, "ways": ways, "seed": SEED}
    in_float64 = pool.run(fit, replace(job, precision=None), chunks, 2, num_ranks=2)
    for strategy, expected in (
        (exact, fit(job, None)["weights"]),
        (chunks, merged(in_float64)),
    ):
        weights = merged(pool.run(fit, job, strategy, 2, num_ranks=2))
        for name, weight in expected.items():
            assert weights[name].dtype is torch.float32
            limit = 8 * 2**-8
            torch.testing.assert_close(weights[name], weight.float(), rtol=limit, atol=limit)


CASES = [
    ("gcn", 1, 1, 4, Techniques()),
    ("gcn", 2, 1, 5, Techniques(refresh_every=4)),
    ("sage", 3, 1, 4, Techniques(shuffle=False, refresh_every=1)),
    ("gcn2", 4, 1, 8, Techniques(refresh_every=3)),
    ("gcn2", 2, 1, 4, Techniques(refresh_every=3, historical_gradients=True)),
    ("sage", 2, 1, 6, Techniques(refresh_every=1, historical_gradients=True)),
    ("gcn2", 4, 2, 4, Techniques(refresh_every=3)),
    ("sage", 4, 2, 3, Techniques(refresh_every=1, historical_gradients=True)),
    ("gcn", 3, 3, 4, Techniques(shuffle=False, refresh_every=4)),
    ("gcn", 4, 2, 2, Techniques(refresh_every=4, historical_gradients=True)),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "num_ranks", "ways", "num_chunks", "techniques"), CASES)
def test_historical_mode_is_the_definition(
    pool: WorkerPool,
    kind: str,
    num_ranks: int,
    ways: int,
    num_chunks: int,
    techniques: Techniques,
) -> None:
    """Nine epochs, refreshes among them; validations between leave the histories alone."""
    graph = LARGE if num_chunks == 8 else {}
    job = FullGraphJob(partial(NodeClassifier, kind, 4, 0.02), graph, epochs=9)
    scores, expected = trained_by_definition(job, num_chunks, techniques, ways)
    strategy = {
        "chunks": num_chunks,
        "ways": ways,
        "seed": SEED,
        "shuffle": techniques.shuffle,
        "refresh_every": techniques.refresh_every,
        "historical_gradients": techniques.historical_gradients,
    }
    results = pool.run(fit, job, strategy, num_ranks, num_ranks=num_ranks)
    for epoch, (got, want) in enumerate(zip(results[0]["scores"], scores, strict=True)):
        torch.testing.assert_close(
            got, want, rtol=0, atol=1e-12, msg=lambda m, e=epoch: f"{e}: {m}"
        )
    weights = merged(results)
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-12)


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("ways", [1, 2])
def test_evaluation_is_exact_whatever_the_training(pool: WorkerPool, ways: int) -> None:
    """The last validation is that of the trained weights on the whole graph."""
    job = FullGraphJob(epochs=5)
    results = pool.run(fit, job, {"chunks": 4, "ways": ways, "seed": SEED}, 2, num_ranks=2)
    module, graph = job.module().double(), random_graph()
    module.load_state_dict(merged(results))
    module.eval()
    with torch.no_grad():
        scores = module(graph.x, graph.edge_index)
    rest = ~graph.train_mask
    expected = float(F.cross_entropy(scores[rest], graph.y[rest]))
    assert results[0]["metrics"]["val_loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ways", [1, 2])
def test_histories_may_begin_with_an_exact_pass(pool: WorkerPool, ways: int) -> None:
    """The first scores are those of one device then, and others with zeros."""
    job = FullGraphJob(epochs=1)
    expected = fit(job, None)["scores"][0]
    strategy = {"chunks": 4, "ways": ways, "seed": SEED}
    exact, zeros = (
        pool.run(fit, job, {**strategy, "history": history}, 2, num_ranks=2)[0]["scores"][0]
        for history in ("exact", "zeros")
    )
    torch.testing.assert_close(exact, expected, rtol=0, atol=1e-12)
    assert float((zeros - expected).abs().max()) > 1e-3


WIDTH, NUM_CLASSES, ITEM_BYTES = 6, 3, 8
BY_HAND = [
    ["net.stem", "net.convs.0", "net.convs.1"],
    ["net.convs.2", "net.convs.3", "net.head"],
]


@pytest.mark.parametrize(("kind", "num_values"), [("gcn", 1), ("gcn2", 2)])
def test_a_pipeline_sends_the_rows_at_its_border(
    pool: WorkerPool, kind: str, num_values: int
) -> None:
    """Forth and back, with h⁰ of GCNII; and the scores from the last stage, which is on rank 0."""
    job = FullGraphJob(partial(NodeClassifier, kind))
    strategy = {"chunks": 5, "seed": SEED, "plan": BY_HAND}
    found = pool.run(sent_bytes, job, strategy, 2, num_ranks=2)[0]
    num_vertices = random_graph().num_nodes
    assert found == 2 * ITEM_BYTES * num_vertices * WIDTH * num_values


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(("ways", "mode"), [(2, "historical"), (3, "exact")])
def test_ways_send_the_rows_of_mirrors(pool: WorkerPool, ways: int, mode: str) -> None:
    """Forth and back before every layer, and once the scores of the others."""
    job, chunks = FullGraphJob(partial(NodeClassifier, "gcn")), 1 if mode == "exact" else 3
    strategy = {"chunks": chunks, "ways": ways, "mode": mode, "seed": SEED}
    found = pool.run(sent_bytes, job, strategy, ways, num_ranks=ways)[0]
    graph = random_graph()
    divided = partition(graph.edge_index, graph.num_nodes, chunks, SEED, ways)
    mirrors, rows = divided.shares.mirrors, divided.shares.rows
    num_rows = 4 * WIDTH * sum(mirrors.values()) + NUM_CLASSES * sum(rows[1:])
    assert found == 2 * ITEM_BYTES * num_rows
