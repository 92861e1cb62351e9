"""Which graphs the recipe reads where none are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .data import GraphData
from .motifs import Motifs
from .tu_files import TUFiles


def gnn_data(root: str | Path | None = None, name: str = "MUTAG", **options: Any) -> GraphData:
    """The data set ``name`` in files below ``root``, or generated graphs where there is no root."""
    return Motifs(**options) if root is None else TUFiles(root, name, **options)
