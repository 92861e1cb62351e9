"""What all plans of one request have in common, found once.

A search judges thousands of stages that differ in a few operators or devices. What operators cost
at a size, how many bytes an edge carries and which link joins two stages does not depend on the
rest of the plan.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from lightning_gpp.cluster import Cluster, Link, ring_lines
from lightning_gpp.cost import Costs, Profile
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner.edge_bytes import EdgeBytes, edge_bytes

Devices = tuple[int, ...]
AllReduceLines = Collection[tuple[float, float]]


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

    Attributes:
        num_ports: through which a device sends: messages over links of one direction at a time
            leave through another one than those over links of both.
        stage_sums: what :func:`lightning_gpp.planner.step_time.gradients.stage_sums` has found.
    """

    def __init__(self, graph: ModelGraph, cluster: Cluster, costs: Costs) -> None:
        self._graph = graph
        self._cluster = cluster
        self._costs = costs
        self._profiles: dict[tuple[float, str], Profile] = {}
        self._computes: dict[tuple[tuple[str, ...], float, str], StageCompute] = {}
        self._parameters: dict[tuple[str, ...], ParameterBytes] = {}
        self._edges: dict[tuple[tuple[str, ...], bool], EdgeBytes] = {}
        self._links: dict[tuple[Devices, Devices], frozenset[Link | None]] = {}
        self._links_from: dict[tuple[int, Devices], Mapping[Link | None, int]] = {}
        self._sums: dict[Devices, AllReduceLines] = {}
        self.stage_sums: dict[Hashable, Any] = {}
        self.num_ports = len({link.is_full_duplex for link in cluster.links})
        self._place = {operator.name: place for place, operator in enumerate(graph)}

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

    def in_order(self, operators: tuple[str, ...]) -> list[str]:
        """Operators in the order of the model's forward."""
        return sorted(operators, key=self._place.__getitem__)

    def links(self, sources: Devices, targets: Devices) -> frozenset[Link | None]:
        """The links between devices of two stages, and None where both have one in common."""
        key = sources, targets
        found = self._links.get(key)
        if found is None:
            found = self._links[key] = _links(self._cluster, sources, targets)
        return found

    def links_from(self, source: int, targets: Devices) -> Mapping[Link | None, int]:
        """How many devices a device has each link to; None to itself."""
        key = source, targets
        found = self._links_from.get(key)
        if found is None:
            link = self._cluster.link
            each = Counter(None if other == source else link(source, other) for other in targets)
            found = self._links_from[key] = each
        return found

    def reduce_s(self, devices: Devices, size_bytes: float) -> float:
        """Seconds of a ring all-reduce over the replicas of a stage."""
        lines = self._sums.get(devices)
        if lines is None:
            lines = self._sums[devices] = ring_lines(self._cluster, devices)
        if not size_bytes:
            return 0.0
        return max([least_s + per_byte_s * size_bytes for least_s, per_byte_s in lines])


def transfer_s(link: Link | None, size_bytes: float) -> float:
    """Seconds of a message; none on one device."""
    return 0.0 if link is None else link.transfer_s(size_bytes)


def _links(cluster: Cluster, sources: Devices, targets: Devices) -> frozenset[Link | None]:
    some, others = _two_per_host(cluster, sources), _two_per_host(cluster, targets)
    found: set[Link | None] = {
        cluster.link(source, target) for source in some for target in others if source != target
    }
    if not set(sources).isdisjoint(targets):
        found.add(None)
    return frozenset(found)


def _two_per_host(cluster: Cluster, devices: Iterable[int]) -> list[int]:
    """Two devices of every host, which have all links that all of them have to other devices."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index in devices:
        device = cluster.devices[index]
        if len(found[device.rack, device.host]) < 2:
            found[device.rack, device.host].append(index)
    return [index for indices in found.values() for index in indices]
