"""Graphs that full-graph training is published on, read by ``torch_geometric`` from their files.

Nothing is downloaded, and nothing is written below the folder of the files: what
``torch_geometric`` makes of them goes to a temporary folder, as several processes may read at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from .full_graph import MASKS, FullGraphData

NUM_SPLITS = 10
"""Of the vertices of Squirrel."""


class PublishedGraph(FullGraphData):
    """A data set of ``torch_geometric`` whose raw files are there.

    Attributes:
        DATA_SET: name of its class in ``torch_geometric.datasets``.
        PARTS: names of its raw files.
        root: the folder that ``torch_geometric`` calls so.
        folder: where the raw files are.

    Raises:
        FileNotFoundError: one of the files is not there.
    """

    DATA_SET: str
    PARTS: tuple[str, ...]

    def __init__(self, root: str | Path, raw: str = "raw") -> None:
        super().__init__()
        self.root, self.folder = Path(root), Path(root) / raw

    def options(self) -> Mapping[str, Any]:
        """More arguments of the class in ``torch_geometric``."""
        return {}

    @abstractmethod
    def with_masks(self, graph: Data) -> Data:
        """The graph as the recipe needs it."""

    def read(self) -> Data:
        """Reads the raw files."""
        from torch_geometric import datasets

        for part in self.PARTS:
            if not (self.folder / part).is_file():
                raise FileNotFoundError(
                    f"{self.folder / part} is not there, and nothing is downloaded; data.root is "
                    f"the folder that torch_geometric.datasets.{self.DATA_SET} takes as root"
                )
        kind: Any = getattr(datasets, self.DATA_SET)
        with TemporaryDirectory() as folder:
            reader = type(kind.__name__, (kind,), {"processed_dir": folder, "log": False})
            graph: Data = reader(str(self.root), **self.options())[0]
        return self.with_masks(graph)


class Flickr(PublishedGraph):
    """Pictures by Flickr's users, joined by what they share (Zeng et al. 2020, 1907.04931)."""

    DATA_SET = "Flickr"
    PARTS = ("adj_full.npz", "feats.npy", "class_map.json", "role.json")

    def with_masks(self, graph: Data) -> Data:
        """It has them."""
        return graph


class Reddit(PublishedGraph):
    """Posts on Reddit, joined by who comments on both (Hamilton et al. 2017, 1706.02216)."""

    DATA_SET = "Reddit"
    PARTS = ("reddit_data.npz", "reddit_graph.npz")

    def with_masks(self, graph: Data) -> Data:
        """It has them."""
        return graph


class Squirrel(PublishedGraph):
    """Pages of Wikipedia on squirrels, joined by links; classes of traffic (Pei et al. 2002.05287).

    Args:
        root: folder with ``squirrel/geom_gcn/raw``.
        split: which of the ten published splits.

    Raises:
        ValueError: there is no such split.
    """

    DATA_SET = "WikipediaNetwork"
    PARTS = (
        *("out1_node_feature_label.txt", "out1_graph_edges.txt"),
        *(f"squirrel_split_0.6_0.2_{split}.npz" for split in range(NUM_SPLITS)),
    )

    def __init__(self, root: str | Path, split: int = 0) -> None:
        super().__init__(root, "squirrel/geom_gcn/raw")
        if not 0 <= split < NUM_SPLITS:
            raise ValueError(f"split is 0 to {NUM_SPLITS - 1}, got {split}")
        self.split = split

    def options(self) -> Mapping[str, Any]:
        """Which of the Wikipedia graphs."""
        return {"name": "squirrel"}

    def with_masks(self, graph: Data) -> Data:
        """With the masks of one split."""
        for name in MASKS:
            graph[name] = graph[name][:, self.split]
        return graph


class Coauthor(PublishedGraph):
    """Authors, joined by papers that they wrote together; classes of fields (1811.05868).

    Args:
        root: folder with ``Physics/raw/ms_academic_phy.npz`` or ``CS/raw/ms_academic_cs.npz``.
        name: ``"Physics"`` or ``"CS"``.
        train_per_class: vertices to train on, drawn of each class.
        num_validation: vertices, drawn of the others.
        num_test: likewise.
        split_seed: of what is drawn.

    Raises:
        ValueError: an unknown name, or more is asked for than there is.
    """

    DATA_SET = "Coauthor"

    def __init__(
        self,
        root: str | Path,
        name: str = "Physics",
        train_per_class: int = 20,
        num_validation: int = 500,
        num_test: int = 1000,
        split_seed: int = 0,
    ) -> None:
        if name not in ("Physics", "CS"):
            raise ValueError(f"name is {name!r}; expected Physics or CS")
        super().__init__(root, f"{name}/raw")
        self.data_set, self.PARTS = name, (f"ms_academic_{name[:3].lower()}.npz",)
        self.sizes = (train_per_class, num_validation, num_test)
        self.split_seed = split_seed

    def options(self) -> Mapping[str, Any]:
        """Which of the two."""
        return {"name": self.data_set}

    def with_masks(self, graph: Data) -> Data:
        """With a split of its own, as the graph comes without."""
        parts = drawn_split(graph.y, *self.sizes, self.split_seed)
        for name, rows in zip(MASKS, parts, strict=True):
            graph[name] = torch.zeros(len(graph.y), dtype=torch.bool)
            graph[name][rows] = True
        return graph


def drawn_split(
    y: Tensor, train_per_class: int, num_validation: int, num_test: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Vertices to train, validate and test with.

    Args:
        y: (vertices,) classes.
        train_per_class: vertices drawn of each class.
        num_validation: drawn of the others.
        num_test: likewise.
        seed: of what is drawn.

    Raises:
        ValueError: there are not so many.
    """
    smallest = int(torch.bincount(y).min())
    if min(train_per_class, num_validation, num_test) < 1 or train_per_class > smallest:
        raise ValueError(
            f"a split needs at least one vertex of each kind and at most the {smallest} of the "
            f"smallest class to train on; got train_per_class={train_per_class}, "
            f"num_validation={num_validation}, num_test={num_test}"
        )
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    is_train = torch.zeros(len(y), dtype=torch.bool)
    for label in range(int(y.max()) + 1):
        is_train[order[y[order] == label][:train_per_class]] = True
    others = order[~is_train[order]]
    if len(others) < num_validation + num_test:
        raise ValueError(
            f"{len(others)} vertices are left beside those to train on, fewer than "
            f"num_validation={num_validation} and num_test={num_test}"
        )
    return (
        is_train.nonzero().flatten(),
        others[:num_validation],
        others[num_validation : num_validation + num_test],
    )
