"""Sharded checkpoints: a folder into which every rank writes its own part.

The folder is one of ``torch.distributed.checkpoint`` with the names that Lightning's FSDP strategy
gives: ``model`` is the state dict by the names of one device, ``optimizer_0`` the state of the
first optimizer by the indices of one device; ``meta.pt`` has the rest of an ordinary checkpoint. So
nothing in it tells how many stages there were, and a rank reads what it holds, whoever wrote it.

Lightning's tool (``python -m lightning.pytorch.utilities.consolidate_checkpoint``) makes a file of
it that has the right weights; the state of optimizers is then by strings, which no optimizer reads.
:func:`unshard_checkpoint` makes the file that one device would have written.

A job may be killed at any moment, also while it writes. Files and folders are written beside the
path that they are for, and renamed when all of it is on the disk: under the path there is always a
whole checkpoint, the last one or the one before. (Lightning writes a file into the folder for
temporary files and moves it; from one file system to another a move is a copy over the last good
file.)
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import TorchCheckpointIO
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_gpp.common.mapped_tensor import empty_mapped
from lightning_gpp.runtime.processes.groups import own_group, pipelines_of

REST = "meta.pt"
"""File in the folder with what is neither the model nor an optimizer, as Lightning names it."""

_MODEL, _OPTIMIZER = "model.", re.compile(r"optimizer_(\d+)")

log = logging.getLogger(__name__)


def is_sharded(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder that this writes."""
    return (Path(path) / REST).is_file()


def unshard_checkpoint(folder: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Converts a sharded checkpoint to an ordinary file; needs memory for all of it.

    Args:
        folder: the folder that a Trainer with ``state_dict_type="sharded"`` wrote.
        file: the file to write.

    Raises:
        ValueError: the folder is none.
    """
    if not is_sharded(folder):
        raise ValueError(f"{folder} is no sharded checkpoint: it has no {REST}")
    saved = ShardedCheckpoint(folder)
    checkpoint = saved.rest(weights_only=True) | {"state_dict": saved.model()}
    if states := saved.optimizers():
        checkpoint["optimizer_states"] = states
    ReplacingCheckpointIO().save_checkpoint(checkpoint, Path(file))


def write(checkpoint: Mapping[str, Any], path: Path, group: dist.ProcessGroup | None) -> None:
    """All ranks of a group: writes a checkpoint into a folder.

    Args:
        checkpoint: of Lightning, with what this rank has of ``state_dict`` and
            ``optimizer_states``; everything else is that of rank 0.
        path: of the folder, which all ranks see.
        group: of the ranks; None writes what this process has.
    """
    rest = dict(checkpoint)
    state = {"model": rest.pop("state_dict")}
    for index, of_optimizer in enumerate(rest.pop("optimizer_states", ())):
        state[f"optimizer_{index}"] = of_optimizer
    with _quiet():
        save(
            state,
            storage_writer=_FolderWriter(path, rest),
            process_group=group,
            no_dist=group is None,
        )


class _FolderWriter(FileSystemWriter):
    """Writes beside the path, and puts the folder in place when all ranks have written."""

    def __init__(self, path: Path, rest: Mapping[str, Any]) -> None:
        super().__init__(being_written(path))
        self._target, self._part, self._rest = path, being_written(path), rest

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Rank 0 makes the folder, below."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Rank 0, before anybody writes."""
        shutil.rmtree(self._part, ignore_errors=True)  # of a job that was killed
        self._part.mkdir(parents=True)
        prepared: list[SavePlan] = super().prepare_global_plan(plans)
        return prepared

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        """Every rank."""
        if not self._part.is_dir():
            raise FileNotFoundError(
                f"{self._part.parent} on this host is not the folder that rank 0 writes to; a "
                "sharded checkpoint needs a file system that all hosts share"
            )
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Rank 0, when all have written."""
        super().finish(metadata, results)
        write_through(dict(self._rest), self._part / REST)
        put_in_place(self._target)


def write_together(
    checkpoint: Mapping[str, Any], path: Path, num_pipelines: int, timeout_s: float
) -> None:
    """All ranks: those of the first pipeline write, as all pipelines have the same.

    Args:
        checkpoint: see :func:`write`.
        path: of the folder.
        num_pipelines: how many there are.
        timeout_s: limit of every wait for other ranks.
    """
    # No group of ranks that do not write: one would give it back while another still connects.
    first = pipelines_of(num_pipelines)[0]
    group = own_group([first], "gloo", timedelta(seconds=timeout_s))
    if dist.get_rank() in first:
        write(checkpoint, path, group)
        dist.destroy_process_group(group)


class ShardedCheckpoint:
    """A checkpoint folder, of which each rank reads what it needs.

    Args:
        path: the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = last_good(path)
        metadata = FileSystemReader(self.path).read_metadata()
        self._entries = metadata.state_dict_metadata
        self._places: Mapping[str, tuple[Any, ...]] = metadata.planner_data

    def rest(self, weights_only: bool | None) -> dict[str, Any]:
        """Content of the checkpoint besides model and optimizer state."""
        loaded: dict[str, Any] = torch.load(
            self.path / REST, map_location="cpu", weights_only=weights_only
        )
        return loaded

    def model(self, *, in_files: bool = False) -> dict[str, Any]:
        """The module's state dict.

        Args:
            in_files: whether its large tensors lie in files, and not in memory.
        """
        keys = [key for key in self._entries if key.startswith(_MODEL)]
        read = self._read(keys, in_files=in_files)
        return {key.removeprefix(_MODEL): value for key, value in read.items()}

    def optimizers(self, indices: Sequence[Collection[int]] | None = None) -> list[dict[str, Any]]:
        """State dicts of all optimizers, as on one device.

        Args:
            indices: for every optimizer the indices of the parameters whose state is wanted; by
                default those of all, and none of optimizers that are left out.
        """
        wanted: dict[str, tuple[Any, ...]] = {}
        for key, (part, *inner) in self._places.items():
            if (found := _OPTIMIZER.fullmatch(part)) is None:
                continue
            optimizer = int(found[1])
            is_state = inner[0] == "state"
            known = () if indices is None or optimizer >= len(indices) else indices[optimizer]
            if is_state:
                inner[1] = int(inner[1])  # torch keeps the keys of dicts as strings
            if not is_state or indices is None or inner[1] in known:
                wanted[key] = (optimizer, *inner)
        states: dict[int, dict[str, Any]] = {}
        for key, value in self._read(wanted).items():
            _put(states, wanted[key], value)
        return [
            {"state": state.get("state", {}), "param_groups": _listed(state["param_groups"])}
            for _, state in sorted(states.items())
        ]

    def _read(self, keys: Collection[str], *, in_files: bool = False) -> dict[str, Any]:
        values = {key: _empty(self._entries[key], in_files) for key in keys}
        if values:
            with _quiet():
                load(values, storage_reader=FileSystemReader(self.path), no_dist=True)
        return values


def _empty(entry: Any, in_file: bool) -> Any:
    """What an entry is read into; what is no tensor comes as it is."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    if in_file:
        return empty_mapped(tuple(entry.size), entry.properties.dtype)
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _put(tree: dict[Any, Any], place: Sequence[Any], value: Any) -> None:
    """Puts a value into nested dicts."""
    for key in place[:-1]:
        tree = tree.setdefault(key, {})
    tree[place[-1]] = value


def _listed(tree: Any) -> list[dict[str, Any]]:
    """Groups that are a list, or, where one has a tensor, a dict by their numbers."""
    return tree if isinstance(tree, list) else [group for _, group in sorted(tree.items())]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without advice for those who did not want one process to read or write alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


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
    """Lightning's checkpoint files, written beside the file that they replace."""

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
