"""What all plans of one request have in common, found once.

A search judges thousands of stages that differ in a few operators or devices. What operators cost
at a size, how many bytes an edge carries and which link joins two stages does not depend on the
rest of the plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from lightning_gpp.cluster import Cluster, Link, all_reduce_s
from lightning_gpp.cost import Costs, Profile
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner.edge_bytes import EdgeBytes, edge_bytes

Devices = tuple[int, ...]


class StageCompute(NamedTuple):
    """What a replica of a stage computes for its share of one micro-batch.

    Attributes:
        forward_s: seconds of the forward.
        backward_s: seconds of the backward; with recomputation the second forward included.
        activation_bytes: bytes kept between forward and backward without recomputation.
    """

    forward_s: float
    backward_s: float
    activation_bytes: int


class ParameterBytes(NamedTuple):
    """Bytes of the parameters that some operators read.

    Attributes:
        all_bytes: of all of them.
        trained_bytes: of those with a gradient.
    """

    all_bytes: int
    trained_bytes: int


class RequestTables:
    """What all plans of one request have in common.

    Args:
        graph: the model.
        cluster: the devices and their links.
        costs: what the operators cost.
    """

    def __init__(self, graph: ModelGraph, cluster: Cluster, costs: Costs) -> None:
        self._graph = graph
        self._cluster = cluster
        self._costs = costs
        self._profiles: dict[tuple[float, str], Profile] = {}
        self._computes: dict[tuple[tuple[str, ...], float, str], StageCompute] = {}
        self._parameters: dict[tuple[str, ...], ParameterBytes] = {}
        self._edges: dict[tuple[tuple[str, ...], bool], EdgeBytes] = {}
        self._links: dict[tuple[Devices, Devices], Link | None] = {}
        self._sums: dict[tuple[Devices, int], float] = {}

    def profile(self, size: float, kind: str) -> Profile:
        """Costs for a micro-batch size, in samples, on a kind of device."""
        key = size, kind
        found = self._profiles.get(key)
        if found is None:  # fitting it takes time
            found = self._profiles[key] = self._costs.at(size, kind)
        return found

    def compute(self, operators: tuple[str, ...], size: float, kind: str) -> StageCompute:
        """What operators take for so many samples on a kind of device, without recomputation."""
        key = operators, size, kind
        found = self._computes.get(key)
        if found is None:
            profile = self.profile(size, kind)
            costs = [profile.operators[name] for name in operators]
            found = self._computes[key] = StageCompute(
                sum(cost.forward_s for cost in costs),
                sum(cost.backward_s for cost in costs),
                sum(cost.activation_bytes for cost in costs),
            )
        return found

    def parameter_bytes(self, operators: tuple[str, ...]) -> ParameterBytes:
        """Bytes of the parameters that operators read, each counted once."""
        found = self._parameters.get(operators)
        if found is None:
            graph = self._graph
            read = {n for name in operators for n in graph.operator[name].parameters}
            parameters = [graph.parameter[name] for name in read]
            found = self._parameters[operators] = ParameterBytes(
                sum(one.size_bytes for one in parameters),
                sum(one.size_bytes for one in parameters if one.requires_grad),
            )
        return found

    def edge_bytes(self, values: tuple[str, ...], *, has_backward: bool = True) -> EdgeBytes:
        """Bytes of the values on an edge."""
        key = values, has_backward
        found = self._edges.get(key)
        if found is None:
            found = self._edges[key] = edge_bytes(self._graph, values, has_backward=has_backward)
        return found

    def slowest_link(self, sources: Devices, targets: Devices) -> Link | None:
        """The slowest link between devices of two stages; None where both are one device."""
        key = sources, targets
        if key not in self._links:
            self._links[key] = _slowest_link(self._cluster, sources, targets)
        return self._links[key]

    def reduce_s(self, devices: Devices, gradient_bytes: int) -> float:
        """Seconds of a ring all-reduce over the replicas of a stage."""
        if len(devices) < 2:
            return 0.0
        key = devices, gradient_bytes
        found = self._sums.get(key)
        if found is None:
            found = self._sums[key] = all_reduce_s(self._cluster, devices, gradient_bytes, "ring")
        return found


def _slowest_link(cluster: Cluster, sources: Devices, targets: Devices) -> Link | None:
    some, others = _two_per_host(cluster, sources), _two_per_host(cluster, targets)
    links = {
        cluster.link(source, target) for source in some for target in others if source != target
    }
    return min(links, key=lambda link: link.bandwidth_bytes_per_s, default=None)


def _two_per_host(cluster: Cluster, devices: Iterable[int]) -> list[int]:
    """Two devices of every host, which have all links that all of them have to other devices."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index in devices:
        device = cluster.devices[index]
        if len(found[device.rack, device.host]) < 2:
            found[device.rack, device.host].append(index)
    return [index for indices in found.values() for index in indices]
