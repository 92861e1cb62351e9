"""What files in the TU format must fulfil; ``torch_geometric`` reads much of it unchecked.

Format: Morris et al. 2020, arXiv 2007.08663: nodes and graphs count from 1, a line per edge in
``A``, a line per node in ``graph_indicator``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float64]

OF_NODES = ("node_labels", "node_attributes")
OF_EDGES = ("edge_labels", "edge_attributes")
OF_GRAPHS = ("graph_labels", "graph_attributes")


def check_tu_files(folder: Path, name: str) -> None:
    """Checks the files of a data set against each other.

    Raises:
        ValueError: a file is broken or does not fit the others; the text names it.
    """

    def path(part: str) -> Path:
        return folder / f"{name}_{part}.txt"

    graph_of = _table(path("graph_indicator"), 1)[:, 0]
    steps = np.diff(graph_of, prepend=1)
    wrong = (steps != 0) & (steps != 1)
    wrong[0] = graph_of[0] != 1
    if wrong.any():
        raise ValueError(
            f"{path('graph_indicator')} must name the graph of each node in ascending order "
            f"without gaps (1, 1, 2, 2, ...); line {_first(wrong)} does not"
        )
    edges = _table(path("A"), 2).astype(np.int64) - 1
    outside = ((edges < 0) | (edges >= len(graph_of))).any(axis=1)
    if outside.any():
        raise ValueError(
            f"{path('A')} names a node outside of 1 to {len(graph_of)} in line {_first(outside)}"
        )
    across = graph_of[edges[:, 0]] != graph_of[edges[:, 1]]
    if across.any():
        raise ValueError(f"{path('A')} joins nodes of two graphs in line {_first(across)}")
    counts = dict.fromkeys(OF_NODES, (len(graph_of), "nodes"))
    counts |= dict.fromkeys(OF_EDGES, (len(edges), "edges"))
    counts |= dict.fromkeys(OF_GRAPHS, (int(graph_of[-1]), "graphs"))
    for part, (count, what) in counts.items():
        if path(part).is_file() and len(_table(path(part))) != count:
            raise ValueError(
                f"{path(part)} has {len(_table(path(part)))} lines; expected one for each of the "
                f"{count} {what}"
            )


def _first(wrong: npt.ArrayLike) -> int:
    """Number of the first wrong line, from 1."""
    return int(np.argmax(wrong)) + 1


def _table(path: Path, num_columns: int | None = None) -> Table:
    text = path.read_text()
    lines = text.splitlines()
    if not lines or not text.endswith("\n") or not all(line.strip() for line in lines):
        raise ValueError(
            f"{path} is cut off or has blank lines; expected lines of numbers, each with its line "
            "break"
        )
    try:
        rows = np.array([[float(cell) for cell in line.split(",")] for line in lines])
    except ValueError as error:
        raise ValueError(f"{path} is no table of numbers with commas: {error}") from None
    if num_columns is not None and rows.shape[1] != num_columns:
        raise ValueError(f"{path} has {rows.shape[1]} columns; expected {num_columns}")
    return rows
