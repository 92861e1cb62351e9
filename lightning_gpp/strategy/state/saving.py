"""What Lightning asks of a strategy to save and load: one file of rank 0, or a folder of all ranks.

Either form is read whatever is written. A checkpoint that is replaced or removed goes when the one
that comes after it is complete, also where that is written in the background
(``Trainer(plugins=AsyncCheckpointIO())``, for both forms).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.plugins import AsyncCheckpointIO, CheckpointIO
from torch.optim import Optimizer

from lightning_gpp.common.mapped_tensor import is_mapped
from lightning_gpp.strategy.lightning_private import LightningOptimizer
from lightning_gpp.strategy.ranks.failure import add_note
from lightning_gpp.strategy.ranks.pipelines import PipelinesStrategy
from lightning_gpp.strategy.session import Session
from lightning_gpp.strategy.state.sharded_checkpoint import (
    ReplacingCheckpointIO,
    ShardedCheckpoint,
    is_sharded,
    last_good,
    write,
)
from lightning_gpp.strategy.state.without_values import give_values
from lightning_gpp.strategy.step.hooks import LedHooks

StateDictType = Literal["full", "sharded"]


class SavingStrategy(PipelinesStrategy):
    """Saves and loads for the ranks of a pipeline."""

    state_dict_type: StateDictType = "full"
    reads_late = True
    """Whether a rank reads the state of its optimizers out of a folder once it knows its part."""

    _session: Session | None
    _hooks: LedHooks | None
    _saved: ShardedCheckpoint | None = None
    _doomed: tuple[str | Path, ...] = ()
    """Checkpoints that one on its way makes superfluous."""

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

    @property
    def _saves_in_background(self) -> bool:
        return isinstance(self.checkpoint_io, AsyncCheckpointIO)

    def _open_session(self) -> Session | None:
        """All ranks: the run, while it is under way. After an error it ends here.

        Callbacks that save a checkpoint then (``OnExceptionCheckpoint``) find the module whole.

        Raises:
            BaseException: the error, where the module cannot be made whole.
        """
        if self._session is None:
            return None
        error = self._session.error_that_ends()
        if error is not None and self._session.lost is not None:
            add_note(error, f"no checkpoint can be written after this error: {self._session.lost}")
            self.teardown()
            raise error
        return None if self._session.is_closed else self._session

    # Saving ----------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All ranks: on rank 0 the state dict of the whole module; sharded: what counts here."""
        module = self._lightning_module
        assert module is not None
        is_sharded = self.state_dict_type == "sharded"
        session = self._open_session()
        if session is None or session.run.model is None:
            return {} if is_sharded and not self.is_global_zero else module.state_dict()
        return session.own_state_dict() if is_sharded else session.module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """All ranks: on rank 0 the state that one device would write; sharded: this rank's part."""
        optimizer = plain(optimizer)
        session = self._open_session()
        if session is None:
            return optimizer.state_dict()
        return session.optimizer_state(optimizer, counted_only=self.state_dict_type == "sharded")

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Rank 0 writes a file, or all ranks a folder; what is there already goes last.

        Hyper-parameters may hold the module itself, so hooks step aside.

        Raises:
            TypeError: options for a folder, which no plug-in writes.
        """
        if self.state_dict_type == "sharded" and storage_options is not None:
            raise TypeError(
                "storage_options are for the plug-in that writes a file; "
                f'state_dict_type="sharded" writes a folder, got {storage_options!r}'
            )
        self._finish_saving()
        hooks = self._hooks
        if hooks is not None:
            hooks.remove()
        try:
            if self.state_dict_type == "full":
                super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
                return
            path, session = Path(self.broadcast(filepath)), self._open_session()
            is_first = self.joined is None or self.joined.peers.pipeline == 0
            if session is not None and is_first:  # all pipelines have the same
                session.save_sharded(checkpoint, path, self._saves_in_background)
            elif session is None and self.is_global_zero:  # the run is over: rank 0 has all
                write(checkpoint, path, None)
        finally:
            if hooks is not None:
                hooks.install()

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint, at the latest when the next one or the run is complete."""
        if self._saves_in_background:
            self._doomed += (filepath,)
        else:
            super().remove_checkpoint(filepath)

    def _finish_saving(self) -> None:
        """Waits for the checkpoint that is being written, then removes those before."""
        session = self._open_session()
        if session is not None:
            session.finish_saving()
        if self._saves_in_background:
            self.checkpoint_io.teardown()  # waits, and raises what went wrong
        doomed, self._doomed = self._doomed, ()
        for path in doomed:
            super().remove_checkpoint(path)

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
            assert self._lightning_module is not None
            give_values(self._lightning_module)
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
