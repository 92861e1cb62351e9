"""One ``self.logger.log_metrics(...)`` per mini-batch, although the step runs per micro-batch.

The calls that the steps of a mini-batch make are noted; afterwards the logger gets them once, with
the numbers joined as those of ``self.log`` are (:mod:`lightning_gpp.strategy.logged_rules`). What
is written through ``self.logger.experiment`` is out of reach: that object is the tool's own.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightning_gpp.strategy.instance_attribute import instance_attribute
from lightning_gpp.strategy.logged_rules import LoggedNumber, LoggedRules


@dataclass(frozen=True, slots=True)
class _Call:
    logger: Logger
    metrics: Mapping[str, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def what(self) -> tuple[int, list[str]]:
        return id(self.logger), list(self.metrics)

    def make(self, metrics: Mapping[str, Any]) -> None:
        self.logger.log_metrics(dict(metrics), *self.args, **self.kwargs)


class LoggerCalls:
    """The ``log_metrics`` calls of the steps of one mini-batch.

    Args:
        loggers: of the Trainer.
        sizes: samples of each micro-batch.

    Attributes:
        microbatch: whose step is running.
    """

    def __init__(self, loggers: Sequence[Logger], sizes: Sequence[int]) -> None:
        self._loggers = loggers
        self._sizes = sizes
        self._calls: list[list[_Call]] = [[] for _ in sizes]
        self.microbatch = 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Notes calls while the steps run."""
        with contextlib.ExitStack() as stack:
            for logger in self._loggers:
                noted = functools.partial(self._note, logger)
                stack.enter_context(instance_attribute(logger, "log_metrics", noted))
            yield

    def _note(self, logger: Logger, metrics: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        cut_off = {k: v.detach().clone() if _is_tensor(v) else v for k, v in metrics.items()}
        self._calls[self.microbatch].append(_Call(logger, cut_off, args, kwargs))

    def numbers(self) -> dict[str, LoggedNumber]:
        """The numbers of calls that all micro-batches made alike, by a name of their own."""
        found = {}
        for index, calls in enumerate(self._alike()):
            for key in calls[0].metrics:
                values = [call.metrics[key] for call in calls]
                if all(_is_number(value) for value in values):
                    tensors = tuple(_as_tensor(value) for value in values)
                    found[_name(index, key)] = LoggedNumber(
                        tensors, tuple(self._sizes), microbatches=tuple(range(len(values)))
                    )
        return found

    def make(self, rules: LoggedRules) -> None:
        """Makes the calls: one for all micro-batches, or where they differ, each as it was."""
        alike = self._alike()
        if not alike:
            for call in (call for calls in self._calls for call in calls):
                call.make(call.metrics)
        joined = {name: rules.joined(name, number) for name, number in self.numbers().items()}
        for index, (first, *_) in enumerate(alike):
            metrics = {
                key: _like(value, joined[name]) if (name := _name(index, key)) in joined else value
                for key, value in first.metrics.items()
            }
            first.make(metrics)

    def _alike(self) -> list[tuple[_Call, ...]]:
        """Calls by their place in the step; nothing if the micro-batches' calls differ."""
        first, *others = ([call.what for call in calls] for calls in self._calls)
        return list(zip(*self._calls, strict=True)) if all(o == first for o in others) else []


def _name(index: int, key: str) -> str:
    return f"log_metrics {key}" if index == 0 else f"log_metrics {key} ({index + 1})"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, numbers.Real)


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.reshape(())
    is_whole = isinstance(value, numbers.Integral)
    return torch.tensor(value, dtype=torch.int64 if is_whole else torch.float64)


def _like(given: Any, joined: Tensor) -> Any:
    return joined if isinstance(given, Tensor) else joined.item()
