"""``self.log`` on rank 0, repeated on all other ranks.

User code runs on rank 0. Its calls of ``self.log`` are made there as they come, noted, and made on
the other ranks inside the same hook, so that progress bars, loggers, checkpoints and early stopping
see on every rank what they would see on one device. Of a metric its name travels: all ranks have
it, and what changed in it travels with the results of the step
(:mod:`~lightning_gpp.strategy.state.leader_state`).
"""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_gpp.common.instance_attribute import instance_attribute
from lightning_gpp.runtime.processes.peers import Peers
from lightning_gpp.strategy.cutting.cutting import mean_over_samples
from lightning_gpp.strategy.state.held_elsewhere import LACKS_VALUES, lifted


@dataclass(slots=True)
class LogCall:
    """A call of ``self.log``, as it is sent to other ranks.

    Attributes:
        name: of what is logged.
        value: of it; of a metric that for the last batch, for logging on step.
        kwargs: its other arguments.
        metric: qualified name of the metric in the LightningModule, if that is logged.
    """

    name: str
    value: Any
    kwargs: dict[str, Any]
    metric: str | None = None


def noted(
    module: nn.Module, name: str, value: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> LogCall:
    """A call of ``self.log`` as it travels.

    Raises:
        ValueError: a metric that is not an attribute of the module, or a value that is no number.
    """
    named = kwargs | dict(zip(_POSITIONAL, args, strict=False))
    if not isinstance(value, Metric):
        return LogCall(name, as_number(name, value), named)
    for path, part in module.named_modules():
        if part is value:
            return LogCall(name, value._forward_cache, named, path)
    raise ValueError(
        f"a {type(value).__name__} was logged that is not an attribute of "
        f"{type(module).__name__}; assign it to the module in __init__ so that every rank has it"
    )


class LedLog:
    """Replaces ``LightningModule.log`` on rank 0: makes the call and records it for other ranks.

    Args:
        module: whose; it names the metrics that are logged.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._log = module.log
        self._calls: list[LogCall] = []

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Makes a call of ``self.log``."""
        with lifted():
            if isinstance(value, Tensor) and value.is_meta:
                raise RuntimeError(f"self.log({name!r}): {LACKS_VALUES}")
            self._log(name, value, *args, **kwargs)
            self._calls.append(noted(self._module, name, value, args, kwargs))

    def calls(self, batch: Any = None) -> list[LogCall]:
        """The calls in their order, with the size of the batch where Lightning looks it up in it.

        Args:
            batch: of the step; None outside of steps.
        """
        lacking = [call for call in self._calls if call.kwargs.get("batch_size") is None]
        if lacking:
            size = None if batch is None else size_for_logs(batch)
            for call in lacking:
                call.kwargs = call.kwargs | {"batch_size": size}
        return self._calls


def joined_calls(logged: Sequence[tuple[LogCall, int]], batch: Any) -> list[LogCall]:
    """One call per name: values are joined as its ``reduce_fx`` says, weighted by samples.

    Args:
        logged: calls in micro-batches, with the samples of each.
        batch: the mini-batch, in which Lightning looks up the size where none is given.
    """
    by_name: dict[str, list[tuple[LogCall, int]]] = {}
    for call, size in logged:
        pair = call, call.kwargs.get("batch_size") or size
        by_name.setdefault(call.name, []).append(pair)
    made, found = [], size_for_logs(batch) if by_name else None
    for name, pairs in by_name.items():
        first, total = pairs[0][0].kwargs, sum(size for _, size in pairs)
        value, metric = pairs[-1][0].value, pairs[-1][0].metric
        if metric is None:
            values, sizes = zip(*[(call.value, size) for call, size in pairs], strict=True)
            value = joined(values, sizes, first.get("reduce_fx", "mean"))
        size = total if first.get("batch_size") is not None else found or total
        made.append(LogCall(name, value, first | {"batch_size": size}, metric))
    return made


def joined(
    values: Sequence[Tensor], sizes: Sequence[int], reduce_fx: str | Callable[[Tensor], Tensor]
) -> Tensor:
    """The value of a mini-batch from those of its micro-batches.

    Args:
        values: one number each.
        sizes: samples of each.
        reduce_fx: of the call of ``self.log``.

    >>> joined([torch.tensor(1.0), torch.tensor(4.0)], [2, 1], "mean")
    tensor(2.)
    """
    stacked = torch.stack(list(values))
    if reduce_fx in ("mean", torch.mean):
        return mean_over_samples(stacked, sizes)
    if isinstance(reduce_fx, str):
        reduce_fx = getattr(torch, reduce_fx.lower())
    assert callable(reduce_fx)
    return reduce_fx(stacked)


def size_for_logs(batch: Any) -> int | None:
    """The size by which Lightning weights what is logged for a batch; None where it finds none."""
    try:
        return extract_batch_size(batch)
    except MisconfigurationException:  # raised again where the size is needed
        return None


_POSITIONAL = tuple(inspect.signature(pl.LightningModule.log).parameters)[3:]
"""Names of the arguments after ``self``, ``name`` and ``value``."""


def as_number(name: str, value: Any) -> Tensor:
    """A logged value as a tensor of its own.

    Raises:
        ValueError: it is no single number; a value of another type gets the text of Lightning.
    """
    if not isinstance(value, (Tensor, numbers.Number)):
        raise ValueError(
            f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values cannot "
            "be logged"
        )
    tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
    if tensor.numel() != 1:
        raise ValueError(
            f"self.log({name!r}, ...) got a tensor of shape {tuple(tensor.shape)}; expected one "
            "number: log its mean, or each of its numbers under a name of its own."
        )
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.get_default_dtype())
    return tensor.clone().reshape(())


def recording(module: pl.LightningModule, log: Callable[..., None]) -> AbstractContextManager[None]:
    """Puts something in the place of the module's ``self.log``."""
    functools.update_wrapper(log, module.log, updated=())  # its signature is the user's
    return instance_attribute(module, "log", log)


def replay(module: pl.LightningModule, calls: Sequence[LogCall]) -> None:
    """Makes noted calls."""
    for call in calls:
        value = call.value
        if call.metric is not None:
            value = module.get_submodule(call.metric)
            value._forward_cache = call.value
        module.log(call.name, value, **call.kwargs)


def compute_alike(module: nn.Module, peers: Peers | None) -> None:
    """Metrics sum over pipelines, and not over the ranks of one, which all hold the same state.

    Args:
        module: whose metrics.
        peers: of this rank in the other pipelines; None if there is one pipeline.
    """

    def gathered(value: Tensor, group: Any = None) -> list[Tensor]:
        assert peers is not None
        found = peers.gather(value.cpu(), "summing the state of a metric")
        return [each.to(value.device) for each in found]

    for part in module.modules():
        if not isinstance(part, Metric):
            continue
        if peers is None:
            part.sync_on_compute = False
            part._to_sync = False
        else:
            part.dist_sync_fn = gathered
            part.distributed_available_fn = lambda: True
