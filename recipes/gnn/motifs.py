"""Generated graphs: which motif hangs on a random tree, or how degrees meet at its edges.

The idea of planting motifs is that of BA-Shapes (Ying et al. 2019, "GNNExplainer", arXiv
1903.03894, section 5). All motifs have five nodes, so their number tells nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch_geometric.data import Data

from .data import GraphData

Pairs = list[tuple[int, int]]

MOTIFS: Mapping[str, Pairs] = MappingProxyType(
    {
        "path": [(0, 1), (1, 2), (2, 3), (3, 4)],
        "cycle": [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)],
        "house": [(0, 1), (1, 2), (2, 3), (3, 0), (0, 4), (1, 4)],
        "wheel": [(0, 1), (1, 2), (2, 3), (3, 0), (0, 4), (1, 4), (2, 4), (3, 4)],
    }
)
MOTIF_NODES = 5
TARGETS = ("motif", "degree_product")


class Motifs(GraphData):
    """Random trees of 8 to 24 nodes with one extra edge and a motif tied on; needs no file.

    Args:
        num_graphs: in all.
        target: ``"motif"``, the class of the motif (as many graphs of each), or
            ``"degree_product"``, the mean over the edges of the product of the degrees at both
            ends, as a logarithm.
        seed: of the graphs.
        options: the arguments of :class:`GraphData`.

    Raises:
        ValueError: too few graphs, or an unknown target.
    """

    def __init__(
        self, num_graphs: int = 2000, target: str = "motif", seed: int = 0, **options: Any
    ) -> None:
        super().__init__(**options)
        if num_graphs < 4 * len(MOTIFS):
            raise ValueError(f"num_graphs must be at least {4 * len(MOTIFS)}, got {num_graphs}")
        if target not in TARGETS:
            raise ValueError(f"target is {target!r}; expected one of {', '.join(TARGETS)}")
        self.num_graphs = num_graphs
        self.target = target
        self.seed = seed

    def read(self) -> list[Data]:
        """Makes the graphs, the same for the same seed."""
        generator = np.random.default_rng(self.seed)
        return [self._graph(index % len(MOTIFS), generator) for index in range(self.num_graphs)]

    def _graph(self, kind: int, generator: np.random.Generator) -> Data:
        num_tree = int(generator.integers(8, 25))
        pairs = tree_with_motif(num_tree, list(MOTIFS.values())[kind], generator)
        num_nodes = num_tree + MOTIF_NODES
        one_way = torch.tensor(pairs).T
        edges = torch.cat([one_way, one_way.flip(0)], dim=1)
        if self.target == "motif":
            y = torch.tensor([kind])
        else:
            y = torch.tensor([degree_product(np.array(pairs), num_nodes)], dtype=torch.float32)
        return Data(edge_index=edges, y=y, num_nodes=num_nodes)


def tree_with_motif(num_tree: int, motif: Pairs, generator: np.random.Generator) -> Pairs:
    """A random tree, one edge more between two of its nodes, and a motif on one of them.

    The extra edge makes a cycle of its own, so a cycle alone does not tell the motif.
    """
    pairs = [(int(generator.integers(node)), node) for node in range(1, num_tree)]
    missing = [
        (a, b) for a in range(num_tree) for b in range(a + 1, num_tree) if (a, b) not in pairs
    ]
    pairs.append(missing[int(generator.integers(len(missing)))])
    pairs += [(num_tree + a, num_tree + b) for a, b in motif]
    pairs.append((int(generator.integers(num_tree)), num_tree + int(generator.integers(5))))
    return pairs


def degree_product(pairs: npt.NDArray[np.int64], num_nodes: int) -> float:
    """Logarithm of the mean product of the degrees at both ends of an edge.

    >>> round(float(np.exp(degree_product(np.array([[0, 1], [1, 2]]), 3))), 6)
    2.0
    """
    degrees = np.bincount(pairs.ravel(), minlength=num_nodes)
    return float(np.log(degrees[pairs].prod(axis=1).mean()))
