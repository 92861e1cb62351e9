"""Writes small graphs in the TU format."""

from __future__ import annotations

from pathlib import Path


def write_part(root: Path, part: str, lines: list[str], name: str = "MUTAG") -> Path:
    """One file of a data set below the root."""
    path = root / name / f"{name}_{part}.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def write_small_graphs(root: Path, num_graphs: int = 10) -> None:
    """Paths of three nodes (class -1) and triangles (class 1) in turn, and a node of its own.

    The last node of every graph has no edge; there are no labels of nodes.
    """
    edges, graph_of = [], []
    for graph in range(num_graphs):
        a, b, c = (4 * graph + 1 + node for node in range(3))
        pairs = [(a, b), (b, c), (c, a)][: 2 + graph % 2]
        edges += [f"{x}, {y}" for pair in pairs for x, y in (pair, pair[::-1])]
        graph_of += [str(graph + 1)] * 4
    write_part(root, "A", edges)
    write_part(root, "graph_indicator", graph_of)
    write_part(root, "graph_labels", [str(graph % 2 * 2 - 1) for graph in range(num_graphs)])
