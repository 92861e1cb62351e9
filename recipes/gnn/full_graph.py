"""One graph whose vertices are classified: citation networks, and generated communities."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader
from torch_geometric.data import Data

MASKS = ("train_mask", "val_mask", "test_mask")


class FullGraphData(LightningDataModule):
    """One graph as the only batch: features ``x``, classes ``y``, and masks of vertices.

    Raises:
        ValueError: what was read is no such graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self._graph: Data | None = None

    @abstractmethod
    def read(self) -> Data:
        """Reads or makes the graph."""

    @property
    def graph(self) -> Data:
        """The graph; read when first asked for."""
        if self._graph is None:
            self._graph = checked(self.read())
        return self._graph

    @property
    def num_features(self) -> int:
        """Features of a vertex."""
        return int(self.graph.x.shape[1])

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return int(self.graph.y.max()) + 1

    def on_after_batch_transfer(self, batch: Data, dataloader_idx: int) -> Data:
        """The graph in the precision of the trainer."""
        if self.trainer is None:
            return batch
        return batch.apply(self.trainer.precision_plugin.convert_input)

    def train_dataloader(self) -> DataLoader[Any]:
        """The graph, once per epoch."""
        return self._loader()

    def val_dataloader(self) -> DataLoader[Any]:
        """The same graph; the step looks at other vertices."""
        return self._loader()

    def predict_dataloader(self) -> DataLoader[Any]:
        """The graph."""
        return self._loader()

    def _loader(self) -> DataLoader[Any]:
        return DataLoader([self.graph], batch_size=None)  # type: ignore[arg-type]


def checked(graph: Data) -> Data:
    """A graph whose parts fit together.

    Raises:
        ValueError: they do not; the text names which.
    """
    num_vertices = len(graph.x)
    for name in ("y", *MASKS):
        found = graph[name]
        if found.shape != (num_vertices,):
            raise ValueError(
                f"{name} has shape {tuple(found.shape)}, the features are of {num_vertices} "
                "vertices; one entry each is needed"
            )
    for name in MASKS:
        if graph[name].dtype != torch.bool or not bool(graph[name].any()):
            raise ValueError(f"{name} has to be true for a vertex at least")
    return graph


class Planetoid(FullGraphData):
    """Cora, CiteSeer or PubMed (Yang et al. 2016, arXiv 1603.08861) with the published split.

    Features of a vertex are scaled to a sum of one, as is usual for these.

    Args:
        root: folder with ``<name>/raw/ind.<name>.x`` and its sister files.
        name: ``"Cora"``, ``"CiteSeer"`` or ``"PubMed"``.

    Raises:
        FileNotFoundError: a file is not there.
    """

    PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")

    def __init__(self, root: str | Path, name: str = "Cora") -> None:
        super().__init__()
        self.folder, self.data_set = Path(root) / name / "raw", name

    def read(self) -> Data:
        """Reads the raw files."""
        from torch_geometric.io import read_planetoid_data

        for part in self.PARTS:
            path = self.folder / f"ind.{self.data_set.lower()}.{part}"
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path} is not there; data.root is the folder that has {self.data_set}/raw "
                    "with the files of github.com/kimiyoung/planetoid"
                )
        graph: Data = read_planetoid_data(str(self.folder), self.data_set)
        graph.x = graph.x / graph.x.sum(1, keepdim=True).clamp(min=1)
        return graph


class BlockModel(FullGraphData):
    """A degree-corrected stochastic block model (Karrer and Newman 2011); needs no file.

    Every vertex has a class. It shows its class among its features with a probability, and
    otherwise another one, so that nobody who looks at features alone is right more often than
    :attr:`best_accuracy_of_features`. Edges lead within classes with a probability, and otherwise
    anywhere; how many a vertex has follows a power law.

    Args:
        num_vertices: of the graph.
        num_edges: drawn, each counted in one direction; the graph has both.
        num_classes: of equal size.
        shown: probability that a vertex shows its class.
        within: probability that an edge stays in a class.
        exponent: of the power law of degrees; larger is more even.
        train_fraction: share of the vertices to train on; half as many again are for validation.
        seed: of everything drawn.

    Raises:
        ValueError: a number makes no sense.
    """

    def __init__(
        self,
        num_vertices: int = 2000,
        num_edges: int = 10000,
        num_classes: int = 5,
        shown: float = 0.4,
        within: float = 0.8,
        exponent: float = 3.0,
        train_fraction: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (("shown", shown), ("within", within)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is a probability, got {value}")
        if num_vertices < 2 * num_classes or num_edges < 1 or num_classes < 2:
            raise ValueError(
                "a block model needs two classes, an edge, and two vertices of every class at "
                f"least; got {num_vertices} vertices, {num_edges} edges, {num_classes} classes"
            )
        if not 0 < train_fraction <= 0.5 or exponent <= 1:
            raise ValueError(
                f"train_fraction is in (0, 0.5] and exponent above 1, got {train_fraction} and "
                f"{exponent}"
            )
        self.num_vertices, self.num_edges = num_vertices, num_edges
        self.num_blocks, self.shown, self.within = num_classes, shown, within
        self.exponent, self.train_fraction, self.seed = exponent, train_fraction, seed

    @property
    def best_accuracy_of_features(self) -> float:
        """Share of the vertices that the best guess from features alone has right."""
        return max(self.shown, (1 - self.shown) / (self.num_blocks - 1))

    def read(self) -> Data:
        """Draws the graph, the same for the same seed."""
        draw = np.random.default_rng(self.seed)
        count, blocks = self.num_vertices, self.num_blocks
        classes = draw.permutation(np.arange(count) % blocks)
        weights = draw.pareto(self.exponent - 1, count) + 1
        source = draw.choice(count, self.num_edges, p=weights / weights.sum())
        target = draw.choice(count, self.num_edges, p=weights / weights.sum())
        stays = draw.random(self.num_edges) < self.within
        for block in range(blocks):
            members = np.flatnonzero(classes == block)
            edges = np.flatnonzero(stays & (classes[source] == block))
            chance = weights[members] / weights[members].sum()
            target[edges] = draw.choice(members, len(edges), p=chance)
        others = (classes + draw.integers(1, blocks, count)) % blocks
        visible = np.where(draw.random(count) < self.shown, classes, others)
        order = draw.permutation(count)
        train = round(self.train_fraction * count)
        parts = np.split(order, [train, train + (train + 1) // 2])
        pairs = np.stack([np.concatenate([source, target]), np.concatenate([target, source])])
        graph = Data(
            x=torch.eye(blocks)[torch.from_numpy(visible)],
            edge_index=torch.from_numpy(pairs),
            y=torch.from_numpy(classes),
        )
        for name, rows in zip(MASKS, parts, strict=True):
            graph[name] = torch.zeros(count, dtype=torch.bool)
            graph[name][torch.from_numpy(rows)] = True
        return graph
