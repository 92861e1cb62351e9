"""The checkpoint that a job loads."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig


def checkpoint_of(config: DictConfig) -> str:
    """The file that ``ckpt_path`` names.

    Raises:
        ValueError: none is named.
        FileNotFoundError: it is not there.
    """
    path = config.ckpt_path
    if path is None:
        raise ValueError(
            "ckpt_path=FILE has to be given: the checkpoint to load; a training run leaves one in "
            "lightning/checkpoints of its folder"
        )
    if not Path(path).is_file():
        raise FileNotFoundError(f"ckpt_path={path} is no file")
    return str(path)
