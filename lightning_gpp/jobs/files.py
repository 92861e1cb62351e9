"""The files that a job writes into its run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def save_json(data: object, path: Path) -> None:
    """Writes plain data that a person or a script reads; no document that is read back as ours."""
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def save_metrics(metrics: Mapping[str, float], folder: Path) -> None:
    """Writes the numbers that a sweep shows of a job."""
    save_json(metrics, folder / "metrics.json")


def written_to(folder: Path) -> str:
    """Where the files are, and which; a folder ends with a slash."""
    names = sorted(path.name + "/" * path.is_dir() for path in folder.glob("[!.]*"))
    return f"written to {folder}{': ' if names else ''}{', '.join(names)}"
