"""Small graphs with a class or a number each: split, node features, batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.utils import degree

from ..in_memory import InMemoryData
from ..split import stratified_split

MAX_DEGREE = 8
NUM_BINS = 10


class GraphDataset:
    """Some graphs in memory; batches are gathered by index."""

    def __init__(self, graphs: Sequence[Data]) -> None:
        self.graphs = graphs

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, index: int) -> Data:
        return self.graphs[index]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        return Batch.from_data_list([self.graphs[index] for index in indices])


class GraphData(InMemoryData):
    """Graphs with a class (``y`` int64 of shape (1,)) or a number (float32) as training batches.

    The split is stratified by class, or by tenths of the range of numbers. Classes are numbered
    from 0; graphs without node features get the one-hot degree of each node, capped.

    Attributes:
        options: of :class:`~lightning_gpp.recipes.in_memory.InMemoryData`.
    """

    def __init__(self, batch_size: int = 128, **options: Any) -> None:
        super().__init__(batch_size=batch_size, **options)
        self._graphs: Sequence[Data] | None = None

    @abstractmethod
    def read(self) -> list[Data]:
        """Reads or makes all graphs."""

    @property
    def graphs(self) -> Sequence[Data]:
        """All graphs, with features; read when first asked for."""
        if self._graphs is None:
            self._graphs = [with_features(graph) for graph in self.read()]
        return self._graphs

    @property
    def num_features(self) -> int:
        """Features of a node."""
        return int(self.graphs[0].x.shape[1])

    @property
    def num_classes(self) -> int | None:
        """Number of classes; None where every graph has a number to be predicted."""
        if self.graphs[0].y.is_floating_point():
            return None
        return int(max(int(graph.y) for graph in self.graphs)) + 1

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """The batch in the precision of the trainer.

        Lightning converts the tensors in collections by itself, but not those in graphs.
        """
        if self.trainer is None:
            return batch
        return batch.apply(self.trainer.precision_plugin.convert_input)

    def build_sets(self) -> tuple[GraphDataset, GraphDataset]:
        """Splits the graphs."""
        targets = np.array([float(graph.y) for graph in self.graphs])
        if self.num_classes is None:
            num_bins = max(1, min(NUM_BINS, len(targets) // 10))
            edges = np.quantile(targets, np.linspace(0, 1, num_bins + 1)[1:-1])
            targets = np.digitize(targets, np.unique(edges))
        parts = stratified_split(
            targets.astype(np.int64), self.validation_fraction, self.split_seed
        )
        train, validation = ([self.graphs[row] for row in rows] for rows in parts)
        return GraphDataset(train), GraphDataset(validation)


def with_features(graph: Data) -> Data:
    """The graph; without node features, with the one-hot degree of each node."""
    if graph.x is None:
        capped = degree(graph.edge_index[0], graph.num_nodes).long().clamp(max=MAX_DEGREE)
        graph.x = torch.nn.functional.one_hot(capped, MAX_DEGREE + 1).float()
        if "num_nodes" in graph:
            del graph.num_nodes  # the features tell
    return graph
