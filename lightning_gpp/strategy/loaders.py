"""One rank reads the user's data loader; the others follow it batch by batch.

Equal seeds on all ranks would not be enough: data sets may draw random numbers, workers are seeded
by rank. So inputs and labels of a sample come from the same draw only if one rank reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_gpp.strategy.control import Control
from lightning_gpp.strategy.failure import FailureWatch
from lightning_gpp.strategy.lightning_private import IndexBatchSampler
from lightning_gpp.strategy.microbatches import size_or_none


class RemoteBatch:
    """Stands for a batch that rank 0 holds.

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
    "{} of a batch was asked for on a rank that does not hold the batch: with the graphpipe "
    "strategy rank 0 reads the data. Look at batches only where `trainer.is_global_zero`."
)


class _LoaderProxy:
    """Forwards attributes to the user's loader, so that Lightning finds samplers and workers."""

    def __init__(
        self,
        loader: Any,
        length: int | None,
        control: Control,
        failures: FailureWatch,
        on_read: Callable[[int, int], None],
    ) -> None:
        own = {"_loader": loader, "_length": length, "_control": control, "_failures": failures}
        own["_on_read"] = on_read
        self.__dict__.update(own)  # everything else is set on the user's loader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_loader"], name, value)

    def __len__(self) -> int:
        length = self.__dict__["_length"]
        if length is None:
            raise TypeError("the data loader of rank 0 has no length")
        assert isinstance(length, int)
        return length


class LeadingLoader(_LoaderProxy):
    """Rank 0: reads the user's loader and tells the others whether there is another batch."""

    def __iter__(self) -> Iterator[Any]:
        with self.__dict__["_failures"].guard(), self.__dict__["_control"].alone(_READING):
            batches = iter(self.__dict__["_loader"])
        return self._batches(batches)

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        control, failures = self.__dict__["_control"], self.__dict__["_failures"]
        end = object()
        while True:
            with failures.guard():
                start_ns = time.monotonic_ns()
                with control.alone(_READING):
                    batch = next(batches, end)
                self.__dict__["_on_read"](start_ns, time.monotonic_ns())
                control.tell((batch is not end, None if batch is end else size_or_none(batch)))
            if batch is end:
                return
            yield batch


class FollowingLoader(_LoaderProxy):
    """Other ranks: a placeholder for every batch that rank 0 reads."""

    def __iter__(self) -> Iterator[Any]:
        control, failures = self.__dict__["_control"], self.__dict__["_failures"]
        sampler = getattr(self.__dict__["_loader"], "batch_sampler", None)
        if isinstance(sampler, IndexBatchSampler):
            sampler.seen_batch_indices = []  # as it is before its first batch; nothing is read here
        while True:
            with failures.guard():
                more, num_samples = control.hear("waiting for rank 0 to read the next batch")
            if not more:
                return
            yield RemoteBatch(num_samples)


def follow_leader(
    loader: Any, control: Control, failures: FailureWatch, on_read: Callable[[int, int], None]
) -> _LoaderProxy:
    """The loader that takes a user's loader's place on this rank.

    Args:
        loader: the user's.
        control: between rank 0 and the others.
        failures: reports what the loader raises.
        on_read: told when rank 0 began and ended reading a batch, in nanoseconds.
    """
    length: int | None = None
    if control.is_leader:
        try:
            length = len(loader)
        except (TypeError, NotImplementedError):
            length = None
    length = control.share(length, "waiting for the length of rank 0's data loader")
    proxy = LeadingLoader if control.is_leader else FollowingLoader
    return proxy(loader, length, control, failures, on_read)
