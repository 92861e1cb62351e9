"""Facts that all plans of one request share, each computed once.

A search judges thousands of stages that differ in a few operators or devices. What operators cost
at a size, how many bytes an edge carries and which link joins two stages does not depend on the
rest of the plan.

How many bytes the values on an edge have at any micro-batch size.

Inputs that stages keep (:attr:`~lightning_gpp.graph.ModelGraph.staying`) are sent in the first step
alone, so they count for what a stage holds and not for what a step sends.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_gpp.cluster import Cluster, Link, ring_lines
from lightning_gpp.common.cached_method import cached_method
from lightning_gpp.cost import Costs, Profile
from lightning_gpp.graph import ModelGraph

Devices = tuple[int, ...]
AllReduceLines = Collection[tuple[float, float]]


class StageCompute(NamedTuple):
    """The compute of a stage's replica for its share of one micro-batch.

    Attributes:
        forward_s: seconds of the forward.
        backward_s: seconds of the backward; with recomputation the second forward included.
        activation_bytes: bytes kept between forward and backward without recomputation.
    """

    forward_s: float
    backward_s: float
    activation_bytes: int


class ParameterBytes(NamedTuple):
    """Bytes of the parameters of some operators.

    Attributes:
        all_bytes: of all of them.
        trained_bytes: of those with a gradient.
    """

    all_bytes: int
    trained_bytes: int


class RequestTables:
    """Facts that all plans of one request share.

    Args:
        graph: the model.
        cluster: the devices and their links.
        costs: what the operators cost.
        sums_share: the part of their time that sums of gradients are taken to need.

    Attributes:
        num_ports: through which a device sends: messages over links of one direction at a time
            leave through another one than those over links of both.
        stage_sums: what :func:`lightning_gpp.planner.step_time.gradients.stage_sums` has found.
        frames: what :mod:`lightning_gpp.planner.step_time.pipeline_run` has found.
        steps: seconds of steps that :mod:`lightning_gpp.planner.step_time.evaluate` has found.
    """

    def __init__(
        self, graph: ModelGraph, cluster: Cluster, costs: Costs, sums_share: float = 1.0
    ) -> None:
        self._graph = graph
        self._cluster = cluster
        self._costs = costs
        self._sums_share = sums_share
        self.stage_sums: dict[Hashable, Any] = {}
        self.frames: dict[Hashable, Any] = {}
        self.steps: dict[Hashable, float] = {}
        self.num_ports = len({link.is_full_duplex for link in cluster.links})
        self._place = {operator.name: place for place, operator in enumerate(graph)}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._graph, self._cluster, self._costs, self._sums_share)

    @cached_method
    def profile(self, size: float, kind: str) -> Profile:
        """Costs for a micro-batch size, in samples, on a kind of device."""
        return self._costs.at(size, kind)

    @cached_method
    def compute(self, operators: tuple[str, ...], size: float, kind: str) -> StageCompute:
        """Costs of operators for a number of samples on a kind of device, without recomputation."""
        profile = self.profile(size, kind)
        costs = [profile.operators[name] for name in operators]
        return StageCompute(
            sum(cost.forward_s for cost in costs),
            sum(cost.backward_s for cost in costs),
            sum(cost.activation_bytes for cost in costs),
        )

    @cached_method
    def parameter_bytes(self, operators: tuple[str, ...]) -> ParameterBytes:
        """Bytes of the parameters that operators read, each counted once."""
        graph = self._graph
        read = {n for name in operators for n in graph.operator[name].parameters}
        parameters = [graph.parameter[name] for name in read]
        return ParameterBytes(
            sum(one.size_bytes for one in parameters),
            sum(one.size_bytes for one in parameters if one.requires_grad),
        )

    @cached_method
    def edge_bytes(self, values: tuple[str, ...], *, has_backward: bool = True) -> EdgeBytes:
        """Bytes of the values on an edge."""
        return edge_bytes(self._graph, values, has_backward=has_backward)

    def in_order(self, operators: tuple[str, ...]) -> list[str]:
        """Operators in the order of the model's forward."""
        return sorted(operators, key=self._place.__getitem__)

    @cached_method
    def links(self, sources: Devices, targets: Devices) -> frozenset[Link | None]:
        """The links between devices of two stages, and None where both have one in common."""
        cluster = self._cluster
        some, others = _two_per_host(cluster, sources), _two_per_host(cluster, targets)
        found: set[Link | None] = {
            cluster.link(source, target) for source in some for target in others if source != target
        }
        if not set(sources).isdisjoint(targets):
            found.add(None)
        return frozenset(found)

    @cached_method
    def links_from(self, source: int, targets: Devices) -> Mapping[Link | None, int]:
        """How many devices a device has each link to; None to itself."""
        link = self._cluster.link
        return Counter(None if other == source else link(source, other) for other in targets)

    @cached_method
    def _ring_lines(self, devices: Devices) -> AllReduceLines:
        return ring_lines(self._cluster, devices)

    def reduce_s(self, devices: Devices, size_bytes: float) -> float:
        """Seconds of a ring all-reduce over the replicas of a stage."""
        if not size_bytes:
            return 0.0
        lines = self._ring_lines(devices)
        longest_s = max([least_s + per_byte_s * size_bytes for least_s, per_byte_s in lines])
        return longest_s * self._sums_share


def transfer_s(link: Link | None, size_bytes: float) -> float:
    """Seconds of a message; none on one device."""
    return 0.0 if link is None else link.transfer_s(size_bytes)


def _two_per_host(cluster: Cluster, devices: Iterable[int]) -> list[int]:
    """Two devices of every host, which have all links that all of them have to other devices."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index in devices:
        device = cluster.devices[index]
        if len(found[device.rack, device.host]) < 2:
            found[device.rack, device.host].append(index)
    return [index for indices in found.values() for index in indices]


@dataclass(frozen=True, slots=True)
class EdgeBytes:
    """Bytes of some values: a part that grows with the samples, and a fixed part.

    Attributes:
        per_sample: bytes per sample of the values that go forward.
        fixed: bytes of those whose tensors are the same size for every micro-batch.
        kept: bytes of those that the stage keeps, which are not sent again.
        gradient_per_sample: bytes per sample of the gradients that come back.
        gradient_fixed: bytes of the gradients of tensors of a fixed size.
    """

    per_sample: float = 0.0
    fixed: float = 0.0
    kept: float = 0.0
    gradient_per_sample: float = 0.0
    gradient_fixed: float = 0.0

    def forward(self, num_samples: float) -> float:
        """Bytes forward for a number of samples."""
        return self.fixed + self.per_sample * num_samples

    def held(self, num_samples: float) -> float:
        """Bytes that the consumer holds for a number of samples."""
        return self.kept + self.forward(num_samples)

    def backward(self, num_samples: float) -> float:
        """Bytes of the gradients for a number of samples."""
        return self.gradient_fixed + self.gradient_per_sample * num_samples


def edge_bytes(graph: ModelGraph, values: Iterable[str], *, has_backward: bool = True) -> EdgeBytes:
    """The bytes of some values of a model.

    Args:
        graph: the model.
        values: their names.
        has_backward: whether gradients come back.
    """
    per_sample = fixed = kept = gradient_per_sample = gradient_fixed = 0.0
    for name in values:
        for spec in graph.values[name].tensors:
            has_gradient = has_backward and spec.is_differentiable
            if name in graph.staying:
                kept += spec.size_bytes
            elif spec.batch_dim is None:
                fixed += spec.size_bytes
                gradient_fixed += spec.size_bytes * has_gradient
            else:
                size_bytes = spec.size_bytes / graph.microbatch_size
                per_sample += size_bytes
                gradient_per_sample += size_bytes * has_gradient
    return EdgeBytes(per_sample, fixed, kept, gradient_per_sample, gradient_fixed)
