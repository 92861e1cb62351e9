"""Saves and loads checkpoints: one file of rank 0, or a folder of all ranks.

Either form is read whatever is written. A checkpoint that is replaced goes when the one that comes
after it is complete.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.plugins import AsyncCheckpointIO, CheckpointIO
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_gpp.common.mapped_tensor import is_mapped
from lightning_gpp.strategy.lightning_private import LightningOptimizer
from lightning_gpp.strategy.ranks.pipelines import PipelinesStrategy
from lightning_gpp.strategy.state.sharded_checkpoint import (
    ReplacingCheckpointIO,
    ShardedCheckpoint,
    is_sharded,
    last_good,
    write,
    write_together,
)
from lightning_gpp.strategy.state.without_values import give_values
from lightning_gpp.strategy.step.hooks import LedHooks

StateDictType = Literal["full", "sharded"]


class SavingStrategy(PipelinesStrategy):
    """Saves and loads for the ranks of a pipeline."""

    state_dict_type: StateDictType = "full"
    reads_late = True
    """Whether a rank reads the state of its optimizers out of a folder once it knows its part."""

    _hooks: LedHooks | None = None
    _saved: ShardedCheckpoint | None = None

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Writes files beside those that they replace, unless the user brings another way."""
        if self._checkpoint_io is None:
            self._checkpoint_io = ReplacingCheckpointIO()
        elif isinstance(self._checkpoint_io, AsyncCheckpointIO):
            self._checkpoint_io.checkpoint_io = ReplacingCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: CheckpointIO) -> None:
        self._checkpoint_io = checkpoint_io

    # Saving ----------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All ranks: on rank 0 the state dict of the whole module; sharded: what counts here."""
        is_sharded, session = self.state_dict_type == "sharded", self._open_session()
        if session is None or session.run.model is None:
            is_away = is_sharded and not self.is_global_zero
            return {} if is_away else self._module().state_dict()
        run = session.run
        if is_sharded:
            return run.partition.counted_state_dict()
        with run.failures.guard(), run.partition.whole():
            return run.module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """All ranks: on rank 0 the state that one device would write; sharded: this rank's part."""
        optimizer, session = plain(optimizer), self._open_session()
        if session is None:
            return optimizer.state_dict()
        run = session.run
        run.take_saved_optimizers()
        for partial in run.partial_optimizers:
            if partial.optimizer is optimizer and self.state_dict_type == "sharded":
                return partial.counted_state_dict()
            if partial.optimizer is optimizer:
                with run.failures.guard():
                    return partial.whole_state_dict()
        return optimizer.state_dict()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Rank 0 writes a file, or all ranks a folder; what is there already goes last.

        Hyper-parameters may hold the module itself, so hooks step aside.

        Raises:
            TypeError: options for a folder, which no plug-in writes.
            NotImplementedError: a folder is to be written in the background.
        """
        if self.state_dict_type == "sharded" and storage_options is not None:
            raise TypeError(
                "storage_options are for the plug-in that writes a file; "
                f'state_dict_type="sharded" writes a folder, got {storage_options!r}'
            )
        if self.state_dict_type == "sharded" and isinstance(self.checkpoint_io, AsyncCheckpointIO):
            raise NotImplementedError(
                "AsyncCheckpointIO writes files in the background, and no folders; leave it out, "
                'or use state_dict_type="full"'
            )
        hooks = self._hooks
        if hooks is not None:
            hooks.close()
        try:
            if self.state_dict_type == "full":
                if self.is_global_zero and isinstance(self.checkpoint_io, AsyncCheckpointIO):
                    # It makes a copy, for which the device may have no room.
                    checkpoint = pytree.tree_map_only(Tensor, Tensor.cpu, checkpoint)
                super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
                return
            path, session = Path(self.broadcast(filepath)), self._open_session()
            if session is not None:
                run = session.run
                with run.failures.guard():
                    write_together(checkpoint, path, run.num_pipelines, run.settings.timeout_s)
            elif self.is_global_zero:  # the run is over: rank 0 has all
                write(checkpoint, path, None)
        finally:
            if hooks is not None:
                hooks.install()

    # Loading ---------------------------------------------------------------------------------

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """A file, or a folder, of which optimizers read their part later."""
        self._saved = None
        if "://" in str(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only)
        path = last_good(checkpoint_path)
        if not is_sharded(path):
            return super().load_checkpoint(path, weights_only)
        saved = ShardedCheckpoint(path)
        if self.reads_late:
            self._saved = saved
        module = self._lightning_module
        in_files = module is not None and any(map(is_mapped, module.parameters()))
        checkpoint = saved.rest(weights_only) | {"state_dict": saved.model(in_files=in_files)}
        if states := saved.optimizers(() if self.reads_late else None):
            checkpoint["optimizer_states"] = states
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Every rank takes the values of what it holds, also while the module is partial."""
        if self._session is not None and self._session.run.model is None:
            give_values(self._module())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Every rank takes the state of what it holds; the file has that of one device."""
        run = None if self._session is None else self._session.run
        if run is None or run.model is None:
            super().load_optimizer_state_dict(checkpoint)
        else:
            with run.whole_optimizers():
                for optimizer, state in zip(
                    self.optimizers, checkpoint["optimizer_states"], strict=True
                ):
                    plain(optimizer).load_state_dict(state)
        if run is not None:
            run.saved_optimizers, self._saved = self._saved, None


def plain(optimizer: Optimizer) -> Optimizer:
    """The optimizer in Lightning's wrapper."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
