"""``self.log`` where the loss is, replayed on every rank.

The user's step runs once per micro-batch on rank 0. Its calls of ``self.log`` are recorded, the
values of one name are joined by the rule that :mod:`lightning_gpp.strategy.logged_rules` finds,
and the joined call is made on every rank inside the same hook, so that progress bars, loggers,
checkpoints and early stopping see on every rank what they would see on one device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric

from lightning_gpp.strategy.instance_attribute import instance_attribute
from lightning_gpp.strategy.logged_rules import LoggedNumber, LoggedRules
from lightning_gpp.strategy.metric_calls import MetricCalls, ValueSource
from lightning_gpp.strategy.metrics import MetricRef, reference


@dataclass(slots=True)
class LogCall:
    """One combined call of ``self.log``."""

    name: str
    value: Tensor | MetricRef
    kwargs: dict[str, Any]


@dataclass(slots=True)
class _Entry:
    kwargs: dict[str, Any]
    values: list[Tensor] = field(default_factory=list)
    metric: Metric | None = None
    sizes: list[int] = field(default_factory=list)
    microbatches: list[int] = field(default_factory=list)
    batch_sizes: list[int | None] = field(default_factory=list)
    sources: list[set[ValueSource]] = field(default_factory=list)

    @property
    def given_sizes(self) -> list[int]:
        return [size for size in self.batch_sizes if size is not None]

    @property
    def number(self) -> LoggedNumber:
        given = self.given_sizes
        weights = given if len(given) == len(self.sizes) else self.sizes
        return LoggedNumber(
            tuple(self.values),
            tuple(weights),
            self.kwargs.get("reduce_fx", "mean"),
            tuple(self.microbatches),
        )


class LogRecorder:
    """Stands in for ``LightningModule.log`` while the user's steps run.

    Args:
        module: whose steps; it names the metrics that are logged.
        metric_calls: of those steps; a value that a metric answered is taken from there.

    Attributes:
        microbatch: whose step is running.
        microbatch_size: its samples.
    """

    def __init__(self, module: pl.LightningModule, metric_calls: MetricCalls | None = None) -> None:
        self._module = module
        self._metric_calls = metric_calls
        self._entries: dict[str, _Entry] = {}
        self.microbatch, self.microbatch_size = 0, 1

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Records a call of ``self.log``."""
        if args:
            kwargs |= dict(zip(_POSITIONAL, args, strict=False))
        entry = self._entries.setdefault(name, _Entry(kwargs))
        if isinstance(value, Metric):
            entry.metric = value
        else:
            entry.values.append(_as_tensor(name, value))
            entry.sources.append(self._metric_calls.sources(value) if self._metric_calls else set())
        entry.sizes.append(self.microbatch_size)
        entry.microbatches.append(self.microbatch)
        entry.batch_sizes.append(kwargs.get("batch_size"))

    @property
    def needs_size(self) -> bool:
        """Whether something was logged without a ``batch_size``."""
        return any(set(entry.batch_sizes) == {None} for entry in self._entries.values())

    def combined(self, num_samples: int | None, rules: LoggedRules | None = None) -> list[LogCall]:
        """One call per name, in the order of the first calls.

        Args:
            num_samples: samples of the mini-batch, the weight of a value without ``batch_size``;
                None outside of steps, and where every value has a ``batch_size``.
            rules: how the micro-batches' values are joined; else as ``reduce_fx`` says.
        """
        rules = rules or LoggedRules()
        calls = []
        for name, entry in self._entries.items():
            kwargs = dict(entry.kwargs)
            given = entry.given_sizes
            kwargs["batch_size"] = sum(given) if given else num_samples
            value: Tensor | MetricRef | None = self._answer(entry)
            if entry.metric is not None:
                value = reference(self._module, entry.metric)
            elif value is None:
                value = rules.joined(name, entry.number)
            calls.append(LogCall(name, value, kwargs))
        return calls

    def numbers(self) -> dict[str, LoggedNumber]:
        """What was logged and is no metric's answer, by name."""
        return {
            name: entry.number
            for name, entry in self._entries.items()
            if entry.metric is None and self._answer(entry) is None
        }

    def _answer(self, entry: _Entry) -> Tensor | None:
        """A metric's answer for the whole mini-batch, if that is what was logged."""
        if self._metric_calls is None or not entry.sources:
            return None
        return self._metric_calls.value(set.intersection(*entry.sources))


class EveryLogCall:
    """Stands in for ``LightningModule.log`` where user code sees whole batches: nothing to combine.

    Args:
        module: whose steps; it names the metrics that are logged.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._calls: list[tuple[str, Tensor | Metric, Any, dict[str, Any]]] = []

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Records a call of ``self.log``."""
        kwargs |= dict(zip(_POSITIONAL, args, strict=False))
        is_metric = isinstance(value, Metric)
        last = value._forward_cache if is_metric else None
        self._calls.append((name, value if is_metric else _as_tensor(name, value), last, kwargs))

    def calls(self, batch: Any) -> list[LogCall]:
        """The calls in their order, with the size of the batch where Lightning would look it up."""
        sizes: list[int | None] = []
        made = []
        for name, value, last, kwargs in self._calls:
            if kwargs.get("batch_size") is None:
                sizes = sizes or [size_for_logs(batch)]
                kwargs = kwargs | {"batch_size": sizes[0]}
            if isinstance(value, Metric):
                ref = dataclasses.replace(reference(self._module, value), last=last)
                made.append(LogCall(name, ref, kwargs))
            else:
                made.append(LogCall(name, value, kwargs))
        return made


def size_for_logs(batch: Any) -> int | None:
    """The size by which Lightning weights what is logged for a batch; None where it finds none."""
    try:
        return extract_batch_size(batch)
    except MisconfigurationException:  # raised again where the size is needed
        return None


_POSITIONAL = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")


def _as_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"self.log({name!r}, ...) got a tensor of shape {tuple(value.shape)}; expected one "
                "number: log its mean, or each of its numbers under a name of its own."
            )
        return value.detach().clone().reshape(())
    if isinstance(value, numbers.Number):
        return torch.tensor(value, dtype=torch.get_default_dtype())
    raise TypeError(
        f"self.log({name!r}, ...) got a {type(value).__name__}; with the graphpipe strategy it "
        "takes numbers, tensors and torchmetrics objects."
    )


@contextlib.contextmanager
def recording(module: pl.LightningModule, recorder: LogRecorder | EveryLogCall) -> Iterator[None]:
    """Records the module's ``self.log`` calls instead of making them."""
    with instance_attribute(module, "log", recorder):
        yield


def replay(module: pl.LightningModule, calls: Sequence[LogCall]) -> None:
    """Makes recorded calls for real."""
    for call in calls:
        value = call.value
        if isinstance(value, MetricRef):
            metric = module.get_submodule(value.name)
            assert isinstance(metric, Metric)
            metric._forward_cache = value.last
            module.log(call.name, metric, **call.kwargs)
        else:
            module.log(call.name, value, **call.kwargs)
