"""One of the processes that ``benchmarks/gpu.py`` starts, as a rank of a place."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from gpu_cases import Case, Place


def as_rank(here: Path) -> None:
    """This process is one of a place; it ends at once where a case fails, and so do the others."""
    task = json.loads((here / "task.json").read_text())
    place = Place(**{**task["place"], "devices": tuple(task["place"]["devices"])})
    for each in task["cases"]:
        case = Case(**each)
        module, _, name = case.measure.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)(place, case, here.parent)
        except BaseException as error:
            lines = str(error).strip().splitlines() or [""]
            told = {
                "summary": f"rank {place.rank}: {type(error).__name__}: {lines[0]}",
                "text": traceback.format_exc(),
            }
            _write(here / f"{place.rank}.error", told)
            sys.stdout.flush()
            os._exit(1)  # what waits for other ranks shall not keep this one
        _write(here / f"{case.name}.{place.rank}.json", found)


def _write(path: Path, found: dict[str, Any]) -> None:
    """Whole or not at all."""
    path.with_suffix(".part").write_text(json.dumps(found))
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    as_rank(Path(sys.argv[1]))
