"""One graph as data: generated communities, published graphs, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from node_files import (
    NUM_CLASSES,
    NUM_FEATURES,
    write_all_node_files,
    write_coauthors,
)

pytest.importorskip("torch_geometric")
from torch_geometric.data import Data

from lightning_gpp.recipes.gnn import (
    BlockModel,
    Coauthor,
    Flickr,
    FullGraphData,
    Planetoid,
    Reddit,
    Squirrel,
)
from lightning_gpp.recipes.gnn.full_graph import MASKS

PLANETOID = Path(os.environ.get("LIGHTNING_GPP_DATA", "absent"), "planetoid")

PUBLISHED: dict[str, Callable[[Path], FullGraphData]] = {
    "planetoid": lambda root: Planetoid(root / "planetoid"),
    "coauthor": lambda root: Coauthor(root / "coauthor"),
    "flickr": lambda root: Flickr(root / "flickr"),
    "reddit": lambda root: Reddit(root / "reddit"),
    "squirrel": lambda root: Squirrel(root / "wikipedia"),
}


def mask_sizes(graph: Data) -> list[int]:
    return [int(graph[name].sum()) for name in MASKS]


# Generated ------------------------------------------------------------------------------------


def test_blocks_are_the_same_for_the_same_seed() -> None:
    first, again, other = (BlockModel(200, 400, seed=seed).graph for seed in (3, 3, 4))
    for name in ("x", "y", "edge_index", *MASKS):
        assert torch.equal(first[name], again[name])
        assert name == "y" or not torch.equal(first[name], other[name])


def test_blocks_are_as_asked() -> None:
    data = BlockModel(1000, 20000, num_classes=4, within=0.7, train_fraction=0.2)
    graph = data.graph
    assert (data.num_features, data.num_classes) == (4, 4)
    assert torch.bincount(graph.y).tolist() == [250] * 4
    assert mask_sizes(graph) == [200, 100, 700]
    assert int(sum(graph[name].long() for name in MASKS).max()) == 1
    assert graph.edge_index.shape == (2, 40000)
    assert graph.is_undirected()
    source, target = graph.y[graph.edge_index]
    expected = 0.7 + 0.3 / 4  # an edge that leads anywhere stays by chance
    assert float((source == target).double().mean()) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shown": 1.5}, r"shown is a probability, got 1\.5"),
        ({"within": -0.1}, r"within is a probability, got -0\.1"),
        ({"num_vertices": 9}, "got 9 vertices, 10000 edges, 5 classes"),
        ({"num_edges": 0}, "got 2000 vertices, 0 edges"),
        ({"num_classes": 1}, "1 classes"),
        ({"train_fraction": 0.6}, r"train_fraction is in \(0, 0\.5\]"),
        ({"exponent": 1.0}, r"exponent above 1, got 0\.1 and 1\.0"),
    ],
)
def test_blocks_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockModel(**options)


# Files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_graphs_are_read(name: str, tmp_path: Path) -> None:
    """Features and classes as written; the files stay alone."""
    write_all_node_files(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    graph = PUBLISHED[name](tmp_path).graph
    count = len(graph.x)
    assert graph.x.shape == (count, NUM_FEATURES)
    assert torch.equal(graph.y, torch.arange(count) % NUM_CLASSES)
    assert torch.equal(graph.x.argmax(1), graph.y)
    source, target = graph.edge_index
    steps, how_often = torch.unique((target - source) % count, return_counts=True)
    assert steps.tolist() == [NUM_CLASSES, count - NUM_CLASSES]
    assert how_often.tolist() == [count, count]
    assert int(sum(graph[name].long() for name in MASKS).max()) == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    """Every one of them; nothing is downloaded."""
    write_all_node_files(tmp_path)
    data = PUBLISHED[name](tmp_path)
    files = [path for path in sorted(tmp_path.rglob("*")) if data.folder in path.parents]
    assert files
    for path in files:
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(FileNotFoundError, match=rf"{path.name} is not there.*data\.root"):
            PUBLISHED[name](tmp_path).graph  # noqa: B018
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_per_class": 534}, "at most the 533 of the smallest class"),
        ({"num_validation": 0}, "num_validation=0"),
        ({"num_test": 1041}, "1540 vertices are left .* num_test=1041"),
    ],
)
def test_splits_that_make_no_sense(options: dict[str, int], message: str, tmp_path: Path) -> None:
    write_coauthors(tmp_path)
    with pytest.raises(ValueError, match=message):
        Coauthor(tmp_path, **options).graph  # noqa: B018


@pytest.mark.skipif(not PLANETOID.is_dir(), reason="no planetoid below LIGHTNING_GPP_DATA")
@pytest.mark.parametrize(
    ("name", "num_vertices", "num_edges", "num_features", "num_classes"),
    [("Cora", 2708, 10556, 1433, 7), ("CiteSeer", 3327, 9104, 3703, 6)],
)
def test_real_citations(
    name: str, num_vertices: int, num_edges: int, num_features: int, num_classes: int
) -> None:
    """The sizes that are known of them, and the public split."""
    data = Planetoid(PLANETOID, name)
    assert data.graph.x.shape == (num_vertices, num_features)
    assert data.graph.edge_index.shape == (2, num_edges)
    assert (data.num_features, data.num_classes) == (num_features, num_classes)
    assert mask_sizes(data.graph) == [20 * num_classes, 500, 1000]
    assert data.graph.is_undirected()


# Any graph ------------------------------------------------------------------------------------


def test_the_graph_is_the_only_batch() -> None:
    data = BlockModel(200, 400)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        (found,) = loader
        assert torch.equal(found.x, data.graph.x)
    assert data.on_after_batch_transfer(data.graph, 0) is data.graph
