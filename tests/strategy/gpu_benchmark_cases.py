"""Cases that ``test_gpu_benchmark.py`` has measured in processes of their own."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


def rank(place: Any, case: Any, folder: Path) -> dict[str, Any]:
    return {"rank": place.rank, "process": os.getpid(), "asked": case.options["asked"]}


def fail(place: Any, case: Any, folder: Path) -> dict[str, Any]:
    """Rank 1 fails while rank 0 waits for it."""
    if place.rank == 1:
        raise ValueError("out of memory\nmore of it")
    time.sleep(600)
    return {}
