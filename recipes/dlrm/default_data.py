"""Which data the recipe reads where none is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .adult import Adult
from .clicks import Clicks
from .data import ClickData


def dlrm_data(root: str | Path | None = None, **options: Any) -> ClickData:
    """UCI Adult below ``root``, or a generated click log where there is no root."""
    return Clicks(**options) if root is None else Adult(root, **options)
