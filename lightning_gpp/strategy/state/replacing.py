"""Checkpoints that take the place of others only once they are complete.

A job may be killed at any moment, also while it writes. What is written is written beside the path
that it is for, and renamed when all of it is on the disk: under the path there is always a whole
checkpoint, the last one or the one before. (Lightning writes a file into the folder for temporary
files and moves it; from one file system to another a move is a copy over the last good file.)
"""

from __future__ import annotations

import logging
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import TorchCheckpointIO

log = logging.getLogger(__name__)


def write_through(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes a file, until all of it is on the disk."""
    with path.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())


def being_written(path: Path) -> Path:
    """Where a checkpoint is while it is written."""
    return path.with_name(f".{path.name}.part")


def put_in_place(path: Path) -> None:
    """Gives what :func:`being_written` names its path; what was there before is gone after.

    A folder cannot be put in the place of another in one go: between two renamings the old one has
    the name that :func:`last_good` knows.
    """
    part, before = being_written(path), _before(path)
    if path.is_dir() or (path.exists() and part.is_dir()):
        _remove(before)
        path.rename(before)
    os.replace(part, path)
    _remove(before)


def last_good(path: str | os.PathLike[str]) -> Path:
    """The path of a checkpoint, or what a job that was killed had just moved out of the way."""
    path = Path(path)
    before = _before(path)
    if path.exists() or not before.exists():
        return path
    log.warning("%s was being replaced when its job ended; the one before is read", path)
    return before


def _before(path: Path) -> Path:
    return path.with_name(f".{path.name}.before")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class ReplacingCheckpointIO(TorchCheckpointIO):
    """Lightning's files, written beside the one that they take the place of, read where needed."""

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads a file; a tensor in it comes into memory when somebody looks at it."""
        if "://" in str(path) or not zipfile.is_zipfile(path):
            return super().load_checkpoint(path, weights_only=weights_only)
        checkpoint: dict[str, Any] = torch.load(
            path, map_location=map_location, mmap=True, weights_only=weights_only
        )
        return checkpoint

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Any = None,
    ) -> None:
        """Writes a file; one with a remote address as Lightning does."""
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_through(checkpoint, being_written(path))
        put_in_place(path)
