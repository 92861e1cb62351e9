"""torchmetrics objects see one call per mini-batch, although the step runs once per micro-batch.

A metric's value is no mean over micro-batches (F1, AUC), a metric may count its calls (a running
window), and a ``MeanMetric`` of losses gives every call the same weight. So the calls that the
steps of a mini-batch make are noted, their effect is taken back, and the same calls are made once
with the arguments of all micro-batches joined: the metric ends as it would on one device.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection

from lightning_gpp.capture.rollback import Snapshot
from lightning_gpp.strategy.instance_attribute import instance_attribute
from lightning_gpp.strategy.results import join_arguments

_METHODS = ("forward", "update", "compute", "reset")


@dataclass(frozen=True, slots=True)
class ValueSource:
    """Where a logged value comes from: a metric's answer.

    Attributes:
        call: how many calls of metrics the step made before that one.
        item: position among the tensors of the answer.
    """

    call: int
    item: int


@dataclass(slots=True)
class _Call:
    metric: nn.Module
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    answer: list[Any] = field(default_factory=list)

    @property
    def what(self) -> tuple[int, str]:
        return id(self.metric), self.method


class MetricCalls:
    """The calls of metrics in the steps of one mini-batch.

    Args:
        module: whose metrics.
        sizes: samples of each micro-batch.

    Attributes:
        microbatch: whose step is running.
    """

    def __init__(self, module: nn.Module, sizes: Sequence[int]) -> None:
        self._metrics = [m for m in module.modules() if isinstance(m, Metric | MetricCollection)]
        self._sizes = sizes
        self._calls: list[list[_Call]] = [[] for _ in sizes]
        self._before: dict[int, Snapshot] = {}
        self._within_call = False
        self._answers: list[list[Any]] | None = None
        self.microbatch = 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Notes calls while the steps run."""
        with contextlib.ExitStack() as stack:
            for metric in self._metrics if len(self._sizes) > 1 else ():
                for method in _METHODS:
                    noted = self._noting(metric, method, getattr(metric, method))
                    stack.enter_context(instance_attribute(metric, method, noted))
            yield

    def _noting(
        self, metric: nn.Module, method: str, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if self._within_call:
                return original(*args, **kwargs)
            self._before.setdefault(id(metric), Snapshot(metric))
            cut_off = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
            with self._uninterrupted():
                answer = original(*args, **kwargs)
            call = _Call(metric, method, cut_off[0], cut_off[1], pytree.tree_leaves(answer))
            self._calls[self.microbatch].append(call)
            return answer

        return noted

    @contextlib.contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """Metrics that call each other (collections, wrappers) are one call."""
        self._within_call = True
        try:
            yield
        finally:
            self._within_call = False

    def sources(self, value: object) -> set[ValueSource]:
        """The answers, among those to the running step, that are this very object."""
        if not isinstance(value, Tensor):
            return set()
        return {
            ValueSource(index, item)
            for index, call in enumerate(self._calls[self.microbatch])
            for item, leaf in enumerate(call.answer)
            if leaf is value
        }

    def value(self, sources: set[ValueSource]) -> Tensor | None:
        """After :meth:`join`: what these answers are for the whole mini-batch.

        None where there is none, or where it cannot be told which one is meant.
        """
        if self._answers is None or not sources:
            return None
        found = [self._answers[source.call][source.item] for source in sources]
        same = all(isinstance(v, Tensor) and torch.equal(v, found[0]) for v in found)
        return found[0] if same else None

    def join(self) -> None:
        """Puts the metrics back and makes the calls of all micro-batches as one."""
        if not any(self._calls):
            return
        first, *others = self._calls
        try:
            if any([c.what for c in calls] != [c.what for c in first] for calls in others):
                raise ValueError("the micro-batches call metrics in different ways")
            given = [
                join_arguments([(c.args, c.kwargs) for c in calls], self._sizes)
                for calls in zip(*self._calls, strict=True)
            ]
        except ValueError as error:
            made = itertools.chain.from_iterable(self._calls)
            names = ", ".join(sorted({type(call.metric).__name__ for call in made}))
            rank_zero_warn(
                f"the calls of {names} in a training step cannot be joined over the micro-batches "
                f"({error}). These metrics see every micro-batch as a batch: values on step are "
                "those of the last one."
            )
            return
        for snapshot in self._before.values():
            snapshot.restore()
        with self._uninterrupted():
            self._answers = [
                pytree.tree_leaves(getattr(call.metric, call.method)(*args, **kwargs))
                for call, (args, kwargs) in zip(first, given, strict=True)
            ]
