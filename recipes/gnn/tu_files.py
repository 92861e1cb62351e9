"""Graph data sets in the text format of the TU Dortmund collection.

Source: Morris et al. 2020, "TUDataset: A collection of benchmark datasets for learning with
graphs", arXiv 2007.08663. Nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_geometric.data import Data
from torch_geometric.data.separate import separate
from torch_geometric.io import read_tu_data

from .data import GraphData
from .tu_checks import OF_GRAPHS, check_tu_files

NEEDED = ("A", "graph_indicator")


class TUFiles(GraphData):
    """Reads ``<root>/<name>/<name>_A.txt`` and its sister files, or those in ``<name>/raw``.

    Node labels and attributes become the features of nodes. The target is the graph's label, or
    its (one) attribute where the data set has attributes.

    Args:
        root: the folder that holds the folder of the data set.
        name: of the data set (``MUTAG``).
        options: the arguments of :class:`GraphData`.
    """

    def __init__(self, root: str | Path, name: str = "MUTAG", **options: Any) -> None:
        super().__init__(**options)
        self.root = Path(root)
        self.dataset = name

    def read(self) -> list[Data]:
        """Reads the files.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is broken, or the graphs have more than one target each.
        """
        folder = self._folder()
        check_tu_files(folder, self.dataset)
        data, slices, _ = read_tu_data(str(folder), self.dataset)
        if data.y.dim() > 1 and data.y.shape[1] > 1:
            raise ValueError(
                f"{self.dataset} in {folder} has {data.y.shape[1]} targets per graph; expected "
                "one class or one number"
            )
        data.y = data.y.reshape(-1)
        count = len(data.y)
        return [separate(Data, data, index, slices, decrement=False) for index in range(count)]

    def _folder(self) -> Path:
        folder = self.root / self.dataset
        folder = folder / "raw" if (folder / "raw").is_dir() else folder
        missing = [f"{self.dataset}_{part}.txt" for part in NEEDED if not self._has(folder, part)]
        if not any(self._has(folder, part) for part in OF_GRAPHS):
            missing.append(f"{self.dataset}_{OF_GRAPHS[0]}.txt")
        if missing:
            raise FileNotFoundError(
                f"{folder} lacks {', '.join(missing)}; data.root must name the folder that holds "
                f"{self.dataset} in the TU format, or be left out to train on generated graphs "
                "(data.root=null)"
            )
        return folder

    def _has(self, folder: Path, part: str) -> bool:
        return (folder / f"{self.dataset}_{part}.txt").is_file()
