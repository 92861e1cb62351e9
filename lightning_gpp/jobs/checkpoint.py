"""The checkpoint that a job loads."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from lightning_gpp.strategy.state.sharded_checkpoint import is_sharded


def checkpoint_of(config: DictConfig) -> str:
    """The file, or the folder of a sharded checkpoint, that ``ckpt_path`` names.

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
    if not (Path(path).is_file() or is_sharded(path)):
        raise FileNotFoundError(f"ckpt_path={path} is no file and no sharded checkpoint")
    return str(path)
