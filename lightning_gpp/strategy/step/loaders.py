"""Rank 0 reads the user's data loader; the other ranks follow batch by batch.

Equal seeds on all ranks would not be enough: data sets may draw random numbers, workers are seeded
by rank. So inputs and labels of a sample come from the same draw only if one rank reads them.

The loaders that a Trainer has stay the user's objects. What is led is the iteration that one of its
loops begins; whoever iterates a loader on his own reads it on his own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_gpp.strategy.cutting.microbatches import size_or_none
from lightning_gpp.strategy.lightning_private import IndexBatchSampler, loaders_of_loops
from lightning_gpp.strategy.pipelined_run import PipelinedRun
from lightning_gpp.strategy.ranks.control import Control
from lightning_gpp.strategy.ranks.messages import BatchRead, DataEnd


class RemoteBatch:
    """Placeholder for a batch that rank 0 holds.

    Hooks and callbacks that look at the batch should do so where ``trainer.is_global_zero``.

    Args:
        num_samples: of the batch, where rank 0 could tell.
    """

    def __init__(self, num_samples: int | None = None) -> None:
        self._num_samples = num_samples

    def __iter__(self) -> Iterator[Tensor]:
        """One tensor without elements, from which Lightning tells the size of the batch."""
        if self._num_samples is None:
            raise RuntimeError(_REMOTE.format("the content"))
        yield torch.empty(self._num_samples, 0, device="meta")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(_REMOTE.format(f"attribute {name!r}"))

    def __getitem__(self, key: object) -> Any:
        raise RuntimeError(_REMOTE.format(f"item {key!r}"))


_READING = "the data loader"

_REMOTE = (
    "this code reads {} of a batch on a rank that does not have it: with the graphpipe strategy "
    "rank 0 reads the data. Look at batches only where `trainer.is_global_zero`."
)


@contextlib.contextmanager
def led_loaders(trainer: pl.Trainer, run: PipelinedRun) -> Iterator[None]:
    """While its body runs, the loops of a Trainer read their loaders through rank 0."""
    begin = CombinedLoader.__iter__

    def led(combined: CombinedLoader) -> Any:
        if not any(combined is each for each in loaders_of_loops(trainer)):
            return begin(combined)
        own = combined.flattened
        try:
            # Lightning asks for its length while it ends, and only one that began has a length:
            # without this, an error below would be lost for that one.
            combined.flattened = [()] * len(own)
            begin(combined)
            with run.failures.guard():
                lengths = run.control.share([sized_len(loader) for loader in own], _LENGTH)
            pairs, is_only = zip(own, lengths, strict=True), len(own) == 1
            combined.flattened = [_Reader(loader, length, run, is_only) for loader, length in pairs]
            return begin(combined)
        finally:
            combined.flattened = own

    CombinedLoader.__iter__ = led  # type: ignore[method-assign]
    try:
        yield
    finally:
        CombinedLoader.__iter__ = begin  # type: ignore[method-assign]


def as_long_as_leaders(loader: Any, control: Control) -> Any:
    """All ranks: the user's loader; one with the length of rank 0's where that is another."""
    length = control.share(sized_len(loader), _LENGTH)
    return loader if sized_len(loader) == length else _Length(loader, length)


_LENGTH = "waiting for the length of rank 0's data loader"


class _Length:
    """A loader with another length.

    Args:
        loader: whose attributes it has.
        length: in batches; None if it is not known.
    """

    def __init__(self, loader: Any, length: int | None) -> None:
        self._loader, self._length = loader, length

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the data loader of rank 0 has no length")
        return self._length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)


class _Reader(_Length):
    """Reads a loader together with the other ranks; a copy of it reads nothing."""

    def __init__(self, loader: Any, length: int | None, run: PipelinedRun, is_only: bool) -> None:
        super().__init__(loader, length)
        self._run, self._is_only = run, is_only

    def __reduce__(self) -> Any:
        return list, ()

    def __iter__(self) -> Iterator[Any]:
        run = self._run
        if not run.control.is_leader:
            sampler = getattr(self._loader, "batch_sampler", None)
            if isinstance(sampler, IndexBatchSampler):
                sampler.seen_batch_indices = []  # as before its first batch; nothing is read here
            return _FollowingBatches(run)
        with run.alone(_READING):
            batches = iter(self._loader)
        led = LeadingBatches(batches, run)
        if run.module.trainer.training:
            can_look = self._is_only and can_look_ahead(self._loader, run)
            run.train_batches = led if can_look or run.settings.is_asynchronous else None
        return led


def can_look_ahead(loader: Any, run: PipelinedRun) -> bool:
    """Rank 0: whether reading a batch a step early gains something, and nobody sees it.

    Nothing is gained on CPUs, where messages take the time of those who compute. Worker processes
    read earlier anyway; what is read in this process may draw random numbers, a loader with a state
    would save another one, and so might the user's hooks.
    """
    hooks = "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"
    owners = run.module, getattr(run.module.trainer, "datamodule", None)
    sends_beside = run.device.type != "cpu" or run.settings.is_emulated
    return (
        sends_beside
        and not run.is_alone
        and isinstance(loader, DataLoader)
        and loader.num_workers > 0
        and not hasattr(loader, "state_dict")
        and sized_len(loader) is not None
        and not any(is_overridden(hook, owner) for owner in owners if owner for hook in hooks)
    )


def batches_left(trainer: pl.Trainer) -> int | float:
    """In a training step: how many batches the Trainer will read after this one in the epoch."""
    loop, each = trainer.fit_loop.epoch_loop, trainer.accumulate_grad_batches
    left = trainer.num_training_batches - loop.batch_progress.current.ready
    if loop.max_steps >= 0:  # up to the last update that the Trainer will make
        last = (loop.max_steps - loop.global_step) * each - loop.batch_idx % each - 1
        left = min(left, last)
    return max(0, left)


def placed_batch(run: PipelinedRun, batch: Any) -> Any:
    """A batch as the Trainer gives it to the step."""
    trainer = run.module.trainer
    batch = trainer.precision_plugin.convert_input(batch)
    batch = run.module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


class _Batches(Iterator[Any]):
    """An iteration that all ranks are in; a copy of it is at its end."""

    def __reduce__(self) -> Any:
        return iter, ((),)


class PlacedBatch:
    """Rank 0: a batch that was read ahead, converted and moved to the device already.

    No dataclass: Lightning would look into it for tensors to convert.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch


class LeadingBatches(_Batches):
    """An iteration of the user's loader on rank 0, which the other ranks follow.

    Args:
        batches: the user's.
        run: of this rank.
    """

    def __init__(self, batches: Iterator[Any], run: PipelinedRun) -> None:
        self._batches, self._run = batches, run
        self._ahead: list[Any] = []

    def __next__(self) -> Any:
        run = self._run
        with run.failures.guard():
            batch = self._ahead.pop(0) if self._ahead else self._read()
            if not run.is_alone:
                raw = batch.batch if isinstance(batch, PlacedBatch) else batch
                read = BatchRead(size_or_none(raw), raw is None)
                run.control.tell(DataEnd() if raw is _END else read)
        if batch is _END:
            raise StopIteration
        return batch

    @property
    def has_next(self) -> bool:
        """Whether a batch is there already that workers have read, so that nobody waits for it."""
        queue = getattr(self._batches, "_data_queue", None)  # of torch's loaders with workers
        return bool(self._ahead) or (queue is not None and not queue.empty())

    def look_ahead(self, count: int, place: Callable[[Any], Any]) -> list[Any]:
        """The batches that come next, as they will be handed out; fewer at the end.

        Args:
            count: how many.
            place: converts a batch and moves it to the device.
        """
        while len(self._ahead) < count and _END not in self._ahead[-1:]:
            batch = self._read()
            self._ahead.append(batch if batch is _END else PlacedBatch(place(batch)))
        return [batch.batch for batch in self._ahead[:count] if batch is not _END]

    def _read(self) -> Any:
        start_ns = time.monotonic_ns()
        with self._run.control.alone(_READING), self._run.around_aside(_READING):
            batch = next(self._batches, _END)
        self._run.recorder.data_read(start_ns, time.monotonic_ns())
        return batch


_END = object()
"""Stands for the end of a loader."""


class _FollowingBatches(_Batches):
    """Other ranks: a placeholder for every batch that rank 0 reads."""

    def __init__(self, run: PipelinedRun) -> None:
        self._run = run

    def __next__(self) -> RemoteBatch | None:
        with self._run.failures.guard():
            told = self._run.control.hear("waiting for rank 0 to read the next batch")
        if isinstance(told, DataEnd):
            raise StopIteration
        return None if told.is_none else RemoteBatch(told.num_samples)
