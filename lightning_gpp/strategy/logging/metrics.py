"""torchmetrics objects that are updated on rank 0 and have the same state on every rank.

``self.log("acc", self.acc)`` hands Lightning a metric that it computes at the end of the epoch, on
every rank, and callbacks may compute one by hand. The user's step updates it where the loss is, so
what changed in it travels with the step's results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_gpp.common.host_copies import to_device
from lightning_gpp.runtime.processes.peers import Peers

_PLAIN = (bool, int, float, str, type(None))
_EVERY_RANKS_OWN = frozenset(
    {"training", "_computed", "_forward_cache", "_is_synced", "_to_sync", "_should_unsync"}
)


@dataclass(frozen=True, slots=True)
class MetricRef:
    """A metric of the module in a log call.

    Attributes:
        name: qualified name of the metric in the LightningModule.
        last: its value for the last batch, for logging on step.
    """

    name: str
    last: Any


@dataclass(frozen=True, slots=True)
class _SeenValue:
    """A value of a metric's attribute, to notice when it changes."""

    value: Any
    version: int | None

    @classmethod
    def of(cls, value: Any) -> _SeenValue:
        if isinstance(value, Tensor):
            # Tensors made in inference mode count no changes: take them as changed.
            return cls(value, None if value.is_inference() else value._version)
        return cls(list(value) if isinstance(value, list) else value, 0)

    def is_now(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            now = _SeenValue.of(value)
            return now.value is self.value and now.version == self.version is not None
        if isinstance(value, list):
            return self.common(value) == len(value) and len(self.value) == len(value)
        return type(value) is type(self.value) and bool(value == self.value)

    def common(self, items: list[Any]) -> int:
        """How many items a list still has in common with this one; all or nothing."""
        mine = self.value if isinstance(self.value, list) else []
        same = len(mine) <= len(items) and all(a is b for a, b in zip(mine, items, strict=False))
        return len(mine) if same else 0


class MetricStates:
    """Notices on rank 0 what changed in a module's metrics, and makes the changes elsewhere.

    Args:
        module: whose metrics; now the same on every rank.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._settled: list[tuple[str, Metric]] | None = None
        self._seen = {place: _SeenValue.of(value) for place, value in self._values()}

    def settle(self) -> None:
        """The module's metrics stay those that it has now."""
        self._settled = list(_metrics_of(self._module))

    def take_changes(self) -> dict[tuple[str, str], Any]:
        """Rank 0: new values by metric and attribute, since the last call.

        Of a list that only grew (predictions kept until the end of an epoch), the new items.
        """
        changes: dict[tuple[str, str], Any] = {}
        for place, value in self._values():
            seen = self._seen.get(place)
            if seen is not None and seen.is_now(value):
                continue
            if isinstance(value, list):
                start = 0 if seen is None else seen.common(value)
                changes[place] = (start, [_copy(item) for item in value[start:]])
            else:
                changes[place] = _copy(value)
            self._seen[place] = _SeenValue.of(value)
        return changes

    def apply(self, place: tuple[str, str], change: Any) -> None:
        """Other ranks: makes one of rank 0's changes."""
        metric = self._module.get_submodule(place[0])
        assert isinstance(metric, Metric)
        values = vars(metric)
        if isinstance(change, tuple):
            start, items = change
            kept = values[place[1]][:start]
            if len(kept) != start:
                raise RuntimeError(
                    f"the metric {place[0]!r} has another state on this rank than on rank 0; do "
                    "not update or reset metrics on some ranks only"
                )
            change = kept + [to_device(item, metric.device) for item in items]
        elif isinstance(change, Tensor):
            change = to_device(change, metric.device)
        values[place[1]] = change
        values["_computed"] = None

    def _values(self) -> Iterator[tuple[tuple[str, str], Any]]:
        metrics = _metrics_of(self._module) if self._settled is None else self._settled
        for name, metric in metrics:
            for key, value in vars(metric).items():
                if key not in _EVERY_RANKS_OWN and _is_state(value):
                    yield (name, key), value


def _metrics_of(module: nn.Module) -> Iterator[tuple[str, Metric]]:
    for name, part in module.named_modules():
        if isinstance(part, Metric):
            yield name, part


def _is_state(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, Tensor) for item in value)
    return isinstance(value, (Tensor, *_PLAIN))


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


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


def reference(module: nn.Module, metric: Metric) -> MetricRef:
    """How a log call that travels names a metric.

    Raises:
        ValueError: the metric is not an attribute of the module.
    """
    for name, part in module.named_modules():
        if part is metric:
            return MetricRef(name, metric._forward_cache)
    raise ValueError(
        f"a {type(metric).__name__} was logged that is not an attribute of "
        f"{type(module).__name__}; assign it to the module in __init__ so that every rank has it"
    )
