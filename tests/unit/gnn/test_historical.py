"""Stages on chunks against the definition of historical embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.history_reference import Net
from torch import Tensor

from lightning_gpp.capture import capture
from lightning_gpp.gnn import (
    ChunkedModel,
    Chunks,
    Techniques,
    chunk_costs,
    mixing_methods,
    partition,
)
from lightning_gpp.gnn.chunks import Remembered
from lightning_gpp.gnn.history import History

NUM_VERTICES, NUM_CHUNKS = 23, 4


@pytest.fixture(autouse=True)
def _float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def graph(seed: int = 0, num_edges: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    """Features, directed edges with loops and repetitions, classes; the last vertex is alone."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(NUM_VERTICES, 5, generator=generator)
    edges = torch.randint(0, NUM_VERTICES - 1, (2, num_edges), generator=generator)
    return x, edges, torch.randint(0, 3, (NUM_VERTICES,), generator=generator)


def chunked(
    net: Net, x: Tensor, edges: Tensor, chunks: Chunks, techniques: Techniques
) -> ChunkedModel:
    """A net that runs in chunks."""
    captured = capture(net, (x, edges), opened=mixing_methods(net))
    return ChunkedModel(captured, captured.inputs((x, edges), {}), chunks, techniques)


def test_equal_edges_of_a_step_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    edges, compared = graph()[1], []
    known, own = Remembered(edges), edges.clone()
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda *two: (compared.append(two), equal(*two))[1])
    assert all(known.is_that_of(own) for _ in range(NUM_CHUNKS))
    assert len(compared) == 1
    own[0, 0] += 1
    assert not known.is_that_of(own)


@pytest.mark.parametrize("num_ways", [1, 2])
def test_costs_have_the_histories(num_ways: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows per vertex that a way has or reads, a part of them with every chunk."""
    torch.manual_seed(1)
    net, (x, edges, _) = Net("gcn", num_layers=2), graph()
    chunks = partition(edges, NUM_VERTICES, NUM_CHUNKS, num_ways=num_ways)
    model = chunked(net, x, edges, chunks, Techniques())
    tensors = model.captured.inputs((x, edges), {})
    model.captured.take_graph(model.graph, model.in_ways.operators)

    def kept() -> dict[str, int]:
        (found,) = chunk_costs(model, tensors).profiles
        return {name: cost.activation_bytes for name, cost in found.operators.items()}

    with_histories = kept()
    assert not model.around.histories
    monkeypatch.setattr(History, "size_bytes", 0)
    without = kept()
    shares = chunks.shares
    layers = 0
    for name, size in with_histories.items():
        _, way = model.in_ways.operators.get(name, ("", 0))
        mirrors = sum(count for (_, reader), count in shares.mirrors.items() if reader == way)
        rows = shares.rows[way] + mirrors if "convs" in name else 0
        assert size - without[name] == 3 * rows * 6 * x.element_size() // NUM_CHUNKS, name
        layers += rows > 0
    assert layers == 2 * num_ways
