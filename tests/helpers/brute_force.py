"""The smallest bottleneck of all divisions of a small model, all or in a line, by trying every one.

It shares no code with the search. Messages take the slowest link, gradients are summed over
neighbours, and the readers of a value are in different stages unless one of them follows another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from helpers.series_parallel import Stages
from lightning_gpp.graph import ModelGraph, StageEdge, StageGraph
from lightning_gpp.planner import PlanRequest
from lightning_gpp.planner.graphpipe.draft import UnitTables
from lightning_gpp.planner.graphpipe.line import UnitLine
from lightning_gpp.schedule import find_schedule

REPLICAS = (1, 2, 4)

INFEASIBLE = math.inf
"""The bottleneck where nothing fits into memory."""


@dataclass(frozen=True)
class _Crew:
    """Devices of a stage: how many, of which kind, and smallest micro-batches at a time."""

    num_replicas: int
    kind: str
    multiple: int


@dataclass(frozen=True)
class _Way:
    """How a stage may run: seconds per sample, and the most micro-batches in flight that fit."""

    seconds_per_sample: float
    most_in_flight: float


class BruteForce:
    """All divisions of one model for one size of the smallest micro-batch.

    Args:
        request: the question.
        size: samples of the smallest micro-batch.
        take_turns: whether replicas take whole micro-batches in turn instead of shares.
        in_line: whether every stage waits for the one before it.
    """

    def __init__(
        self, request: PlanRequest, size: int, *, take_turns: bool = False, in_line: bool = False
    ) -> None:
        self._request = request
        self._in_line = in_line
        self._graph = request.graph
        self._size = size
        self._num_units = request.minibatch_size // size
        self._take_turns = take_turns
        self._ways_of: dict[tuple[frozenset[int], _Crew, bool], list[_Way]] = {}

    def smallest_bottleneck_s(self, divisions: Sequence[tuple[Stages, Sequence[int]]]) -> float:
        """Seconds per sample of the slowest stage; :data:`INFEASIBLE` if nothing fits.

        Args:
            divisions: with the stages of each that may be the last one.
        """
        best = INFEASIBLE
        for stages, lasts in divisions:
            if len(stages) <= self._request.num_devices:
                for last in lasts:
                    best = min(best, self._best_of(stages, last, best))
        return best

    def _best_of(self, stages: Stages, last: int, bound_s: float) -> float:
        order = stages if self._in_line else next(orders(stages, last, self._edges))
        choices = []
        for stage in order:
            crews = [
                crew
                for crew in self._crews
                if any(
                    way.seconds_per_sample < bound_s
                    for way in self._ways(stage, crew, is_last=stage is order[-1])
                )
            ]
            choices.append(crews)
        best = bound_s
        for crews in itertools.product(*choices):
            if self._are_there(crews):
                best = min(best, self._bottleneck_s(order, crews))
        return best

    def _bottleneck_s(self, order: Stages, crews: Sequence[_Crew]) -> float:
        edges = self._edges
        if self._in_line:
            firsts = [min(stage) for stage in order]
            edges = edges + list(itertools.pairwise(firsts))
        in_flight = _in_flight(self._request.schedule, order, crews, edges, self._num_units)
        slowest_s = 0.0
        for number, (stage, crew) in enumerate(zip(order, crews)):
            fitting = [
                way.seconds_per_sample
                for way in self._ways(stage, crew, is_last=stage is order[-1])
                if in_flight[number] <= way.most_in_flight
            ]
            slowest_s = max(slowest_s, min(fitting, default=INFEASIBLE))
        return slowest_s

    @cached_property
    def _edges(self) -> list[tuple[int, int]]:
        return edges_between(self._graph)

    @cached_property
    def _crews(self) -> list[_Crew]:
        found = []
        for kind in self._request.cluster.kinds:
            count = sum(device.kind == kind for device in self._request.cluster.devices)
            for copies in REPLICAS:
                shared = self._num_units if self._take_turns else self._size
                if copies <= count and not shared % copies:
                    found.append(_Crew(copies, kind, copies if self._take_turns else 1))
        return found

    def _are_there(self, crews: Sequence[_Crew]) -> bool:
        free = [device.kind for device in self._request.cluster.devices]
        return all(
            sum(crew.num_replicas for crew in crews if crew.kind == kind) <= free.count(kind)
            for kind in set(free)
        )

    def _ways(self, stage: frozenset[int], crew: _Crew, *, is_last: bool) -> list[_Way]:
        key = stage, crew, is_last
        if key not in self._ways_of:
            self._ways_of[key] = list(self._found_ways(stage, crew, self._step_bytes * is_last))
        return self._ways_of[key]

    @cached_property
    def _step_bytes(self) -> float:
        """What the user's step holds: its batch, the outputs and their gradients."""
        request, graph = self._request, self._graph
        samples = request.minibatch_size if request.schedule == "gpipe" else self._size
        batch = sum(self._bytes(one.value.name, request.minibatch_size) for one in graph.inputs)
        return batch + 2 * sum(self._bytes(name, samples) for name in graph.outputs)

    def _found_ways(self, stage: frozenset[int], crew: _Crew, step_bytes: float) -> Iterator[_Way]:
        request = self._request
        operators = [self._graph.operators[node] for node in sorted(stage)]
        has_state = any(operator.state for operator in operators)
        if has_state and crew.num_replicas > 1:
            return
        share = self._size * crew.multiple / crew.num_replicas
        costs = [request.profile(share, crew.kind).operators[o.name] for o in operators]
        forward_s = sum(cost.forward_s for cost in costs)
        compute_s = forward_s + sum(cost.backward_s for cost in costs)
        kept = sum(cost.activation_bytes for cost in costs)
        names = {name for operator in operators for name in operator.parameters}
        weights = sum(self._graph.parameter[name].size_bytes for name in names)
        message_s, inputs = self._messages(stage, share)
        reduce_s = self._reduce_s(weights, crew.num_replicas)
        rest_s = reduce_s / request.minibatch_size
        size = self._size * crew.multiple
        free = self._memory(crew.kind) - weights * (2 + request.optimizer_values) - step_bytes
        yield _Way(max(compute_s, message_s) / size + rest_s, _times(kept, free))
        if request.may_recompute and not has_state:
            again_s = max(compute_s + forward_s, message_s) / size + rest_s
            yield _Way(again_s, _times(inputs, free - kept))

    def _messages(self, stage: frozenset[int], share: float) -> tuple[float, float]:
        """Seconds that a replica sends or receives, the longer, and bytes of its inputs."""
        graph, number = self._graph, {o.name: i for i, o in enumerate(self._graph)}
        sent = received = inputs = 0.0
        num_sent = num_received = 0
        read = {name for node in stage for name in graph.operators[node].inputs}
        senders = set()
        for name in read:
            source = graph.producer.get(name)
            if source is not None and number[source] in stage:
                continue
            inputs += self._bytes(name, share)
            received += self._bytes(name, share)
            sent += self._bytes(name, share) if source is not None else 0.0
            senders.add(source)
        num_received += len(senders)
        num_sent += len(senders - {None})
        for node in stage:
            for value in graph.operators[node].outputs:
                outside = [
                    i for i, o in enumerate(graph) if value.name in o.inputs and i not in stage
                ]
                count = sum(not any(i in self._before[o] for i in outside) for o in outside)
                sent += count * self._bytes(value.name, share)
                received += count * self._bytes(value.name, share)
                num_sent += count
                num_received += count
        link = self._request.cluster.slowest_link
        each_s = 1 / link.bandwidth_bytes_per_s
        ways_s = (num_sent * link.latency_s + sent * each_s,
                  num_received * link.latency_s + received * each_s)  # fmt: skip
        return max(ways_s), inputs

    @cached_property
    def _before(self) -> list[set[int]]:
        before: list[set[int]] = []
        for node in range(len(self._graph)):
            sources = {a for a, b in self._edges if b == node}
            before.append(sources.union(*(before[source] for source in sources)))
        return before

    def _bytes(self, name: str, share: float) -> float:
        (spec,) = self._graph.values[name].tensors
        return share * spec.size_bytes / spec.shape[0]

    def _memory(self, kind: str) -> float:
        limits = {d.memory_bytes for d in self._request.cluster.devices if d.kind == kind}
        return min(math.inf if limit is None else limit for limit in limits)

    def _reduce_s(self, gradient_bytes: int, num_replicas: int) -> float:
        """A ring over the first devices, as if all groups of replicas were neighbours."""
        if num_replicas == 1 or not gradient_bytes:
            return 0.0
        cluster, part = self._request.cluster, gradient_bytes / num_replicas
        links = [cluster.link(i, (i + 1) % num_replicas) for i in range(num_replicas)]
        slowest_s = max(link.latency_s + part / link.bandwidth_bytes_per_s for link in links)
        return 2 * (num_replicas - 1) * slowest_s


def _times(each: float, free: float) -> float:
    """How often something fits."""
    if free < 0:
        return 0
    return math.inf if not each or math.isinf(free) else free // each


def edges_between(graph: ModelGraph) -> list[tuple[int, int]]:
    """The operators that read from each other, by their numbers."""
    number = {operator.name: index for index, operator in enumerate(graph)}
    return [
        (number[source], number[operator.name])
        for operator in graph
        for source in graph.predecessors[operator.name]
    ]


def orders(stages: Stages, last: int, edges: Sequence[tuple[int, int]]) -> Iterator[Stages]:
    """The stages in every topological order that ends with the one that has the loss."""
    others = [stage for index, stage in enumerate(stages) if index != last]
    for order in itertools.permutations(others):
        home = {node: number for number, stage in enumerate(order) for node in stage}
        if all(home[a] <= home.get(b, len(order)) for a, b in edges if a in home):
            yield (*order, stages[last])


def _in_flight(
    schedule: str,
    order: Stages,
    crews: Sequence[_Crew],
    edges: Sequence[tuple[int, int]],
    num_units: int,
) -> dict[int, int]:
    """Micro-batches in flight; all wait for the loss, which replicas have in a stage of its own."""
    home = {node: number for number, stage in enumerate(order) for node in stage}
    last = len(order) - 1
    pairs = {(home[a], home[b]) for a, b in edges if home[a] != home[b]}
    pairs |= {(number, last) for number in range(last)}
    multiples = [crew.multiple for crew in crews]
    if crews[-1].num_replicas > 1:
        pairs.add((last, last + 1))
        multiples.append(crews[-1].multiple)
    graph = StageGraph(len(multiples), tuple(StageEdge(*pair, ()) for pair in sorted(pairs)))
    return find_schedule(schedule).peak_in_flight(graph, num_units, multiples)


def line_divisions(request: PlanRequest) -> list[tuple[Stages, Sequence[int]]]:
    """All divisions of the model in a line, each with its last stage."""
    number = {operator.name: index for index, operator in enumerate(request.graph)}
    tables = UnitTables(request)
    line = [[number[name] for name in tables.units.operators[unit]] for unit in tables.order]
    found = []
    for cuts in itertools.product((False, True), repeat=len(line) - 1):
        borders = [0, *(at for at, is_cut in enumerate(cuts, 1) if is_cut), len(line)]
        stages = tuple(
            frozenset(node for unit in line[start:stop] for node in unit)
            for start, stop in itertools.pairwise(borders)
        )
        found.append((stages, [len(stages) - 1]))
    return found


def found_bottleneck_s(request: PlanRequest, size: int) -> float:
    """The smallest bottleneck of the divisions that a search begins with."""
    kinds = [device.kind for device in request.cluster.devices]
    line = UnitLine(UnitTables(request), size, kinds, take_turns=False, hides_sums=False)
    slowest = (max(one.seconds for one in cut.stages()) for cut in line.divisions())
    return min(slowest, default=INFEASIBLE)
