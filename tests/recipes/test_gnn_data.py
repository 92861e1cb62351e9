"""Generated graphs and files in the TU format: what is made, read, and refused."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import pytest
import torch
from graph_files import write_part, write_small_graphs

pytest.importorskip("torch_geometric")
from torch_geometric.data import Data
from torch_geometric.utils import to_networkx

from lightning_gpp.recipes.gnn import Motifs, TUFiles, gnn_data
from lightning_gpp.recipes.gnn.data import MAX_DEGREE

MOTIF_EDGES = {0: 4, 1: 5, 2: 6, 3: 8}
TRIANGLES = {0: 0, 1: 0, 2: 1, 3: 4}
"""Class -> edges and triangles of path, cycle, house and wheel."""


def same(a: Data, b: Data) -> bool:
    return torch.equal(a.edge_index, b.edge_index) and torch.equal(a.y, b.y)


def test_motifs_are_the_same_for_the_same_seed() -> None:
    first, again, other = (Motifs(num_graphs=16, seed=seed).graphs for seed in (3, 3, 4))
    assert all(map(same, first, again))
    assert not all(map(same, first, other))


def test_labels_are_the_motifs() -> None:
    """The motif are the last five nodes; one edge ties them on."""
    for graph in Motifs(num_graphs=64).graphs:
        whole = to_networkx(graph, to_undirected=True)
        motif = whole.subgraph(list(whole)[-5:])
        assert nx.is_connected(whole)
        assert graph.is_undirected()
        assert motif.number_of_edges() == MOTIF_EDGES[int(graph.y)]
        assert sum(nx.triangles(motif).values()) // 3 == TRIANGLES[int(graph.y)]
        assert nx.number_of_edges(whole) == len(whole) - 5 + 1 + motif.number_of_edges()
        degrees = torch.tensor([degree for _, degree in whole.degree()])
        assert torch.equal(graph.x.argmax(dim=1), degrees.clamp(max=MAX_DEGREE))


def test_options_of_motifs_are_checked() -> None:
    with pytest.raises(ValueError, match="num_graphs must be at least 16, got 8"):
        Motifs(num_graphs=8)
    with pytest.raises(ValueError, match="target is 'size'"):
        Motifs(target="size")


class TestFiles:
    def test_root_selects_the_data(self, tmp_path: Path) -> None:
        assert isinstance(gnn_data(), Motifs)
        assert isinstance(gnn_data(tmp_path, batch_size=5), TUFiles)

    def test_graphs_without_features_get_degrees(self, tmp_path: Path) -> None:
        write_small_graphs(tmp_path)
        data = TUFiles(tmp_path)
        assert [int(graph.y) for graph in data.graphs] == [0, 1] * 5
        assert data.num_classes == 2
        for graph in data.graphs:
            degrees = [2, 2, 2, 0] if int(graph.y) else [1, 2, 1, 0]
            assert graph.x.argmax(dim=1).tolist() == degrees
            assert graph.edge_index.max() == 2
        data.setup()
        (batch,) = data.val_dataloader()
        assert sorted(batch.y.tolist()) == [0, 1]

    @pytest.mark.parametrize("part", ["A", "graph_indicator", "graph_labels"])
    def test_a_missing_file_is_named(self, tmp_path: Path, part: str) -> None:
        write_small_graphs(tmp_path)
        (tmp_path / "MUTAG" / f"MUTAG_{part}.txt").unlink()
        with pytest.raises(FileNotFoundError, match=rf"lacks MUTAG_{part}\.txt; data\.root must"):
            TUFiles(tmp_path).read()

    @pytest.mark.parametrize(
        ("part", "lines", "problem"),
        [
            ("A", ["1, 2", "2, one"], "no table of numbers"),
            ("A", ["1, 2", "2, 99"], "outside of 1 to 40 in line 2"),
            ("A", ["1, 2", "2, 5"], "joins nodes of two graphs in line 2"),
            ("A", ["1", "2"], "has 1 columns; expected 2"),
            ("A", ["1, 2", "", "2, 1"], "blank lines"),
            ("graph_indicator", ["1", "2", "1"], "line 3 does not"),
            ("graph_labels", ["1"] * 9, "has 9 lines; expected one for each of the 10 graphs"),
            ("node_labels", ["1"] * 39, "has 39 lines; expected one for each of the 40 nodes"),
            ("edge_labels", ["1"], "has 1 lines; expected one for each of the 50 edges"),
        ],
    )
    def test_a_broken_file_is_named(
        self, tmp_path: Path, part: str, lines: list[str], problem: str
    ) -> None:
        write_small_graphs(tmp_path)
        write_part(tmp_path, part, lines)
        with pytest.raises(ValueError, match=rf"MUTAG_{part}\.txt .*{problem}"):
            TUFiles(tmp_path).read()
