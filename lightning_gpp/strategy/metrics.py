"""torchmetrics objects that are updated on rank 0 and logged on every rank.

``self.log("acc", self.acc)`` hands Lightning a metric that it computes at the end of the epoch, on
every rank. The user's step updates it where the loss is, so its state travels with the log call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torchmetrics import Metric


@dataclass(frozen=True, slots=True)
class MetricState:
    """A metric of the module and its state on rank 0.

    Attributes:
        name: qualified name of the metric in the LightningModule.
        values: its accumulated states by name.
        num_updates: how often it was updated.
        last: its value for the last batch, for logging on step.
    """

    name: str
    values: dict[str, Any]
    num_updates: int
    last: Any


def keep_local(module: nn.Module) -> None:
    """Stops metrics from summing over ranks, which all hold the same state."""
    for part in module.modules():
        if isinstance(part, Metric):
            part.sync_on_compute = False
            part._to_sync = False


def state_of(module: nn.Module, metric: Metric) -> MetricState:
    """The state of a metric, to be sent.

    Raises:
        ValueError: the metric is not an attribute of the module.
    """
    for name, part in module.named_modules():
        if part is metric:
            values = {key: getattr(metric, key) for key in metric._defaults}
            return MetricState(name, values, metric._update_count, metric._forward_cache)
    raise ValueError(
        f"a {type(metric).__name__} was logged that is not an attribute of "
        f"{type(module).__name__}; assign it to the module in __init__ so that every rank has it"
    )


def load_state(module: nn.Module, state: MetricState) -> Metric:
    """The metric on this rank, with a state that was received."""
    metric = module.get_submodule(state.name)
    assert isinstance(metric, Metric)
    for key, value in state.values.items():
        setattr(metric, key, value)
    metric._update_count = state.num_updates
    metric._forward_cache = state.last
    metric._computed = None
    return metric
