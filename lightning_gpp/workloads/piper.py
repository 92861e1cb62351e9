"""Piper's problem as data, read from its inputs (JSON), and the workload that it describes.

Source: "Piper: Multidimensional Planner for DNN Parallelization" (NeurIPS 2021), section 3. A
*TMPC* (time, memory, parameters, communication) is one way to run an operator on a number of
devices, for example with its activations kept or computed again.

The format is described in the README of github msr-fiddle/piper. It names no unit of time, and the
published files do not agree: ``resnet.json`` holds milliseconds (its sums equal PipeDream's
profile), ``bert32a100.json`` seconds, while both give the bandwidth in bytes per second. So the
unit is an argument, and if it is not given, what the default makes of the file is held against
what memory can do (:data:`PLAUSIBLE_BYTES_PER_S`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lightning_gpp.common.checks import LARGEST, check_whole, is_number, short_repr
from lightning_gpp.common.data_file import read_text
from lightning_gpp.common.strict_json import from_data, parse_json
from lightning_gpp.cost import ANY_DEVICE, Costs, OpProfile, Profile
from lightning_gpp.graph import GraphInput, ModelGraph, OpNode, Parameter, TensorSpec, Value
from lightning_gpp.workloads.fields import batch_value, execution_order, scope_of
from lightning_gpp.workloads.workload import Workload

T = TypeVar("T")

SOURCE = "Piper (NeurIPS 2021), github msr-fiddle/piper"

FORWARD_SHARE = 1 / 3
"""Of the time of forward and backward, where nothing tells them apart."""

MAX_SAMPLES_PER_DEVICE = 16
"""A mini-batch for every device. Piper's own are hundreds of times that and only make its
synchronisation cheap; so many fill a pipeline, and a program of them is still quickly played."""

EXPECTED = "an input of Piper (JSON)"
DEFAULT_TIME_UNIT_S = 1e-3
"""Milliseconds, as in ``resnet.json``."""

PLAUSIBLE_BYTES_PER_S = (2e8, 5e12)
"""Bytes of activations made per second of compute; the published files have 2e10 to 4e10."""


@dataclass(frozen=True, slots=True)
class Tmpc:
    """One way to run an operator; Piper's symbols in brackets.

    Attributes:
        name: ``"vanilla"``, ``"activation recomp"``, …
        seconds_per_sample: forward and backward [p].
        parameter_bytes: weights to synchronise between data-parallel copies [w].
        memory_bytes_in_flight: memory for every sample in flight [a].
        memory_bytes_fixed: memory beside that [b].
        sync_forward_bytes: operator that it reads from -> extra bytes when that one is in another
            stage [c^fw].
        sync_backward_bytes: operator that reads from it -> extra bytes likewise [c^bw].
    """

    name: str
    seconds_per_sample: float
    parameter_bytes: float
    memory_bytes_in_flight: float
    memory_bytes_fixed: float
    sync_forward_bytes: Mapping[int, float]
    sync_backward_bytes: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class PiperOperator:
    """An operator.

    Attributes:
        id: its number in the file.
        name: for people.
        ways: tensor-parallel degree -> ways to run it on so many devices.
    """

    id: int
    name: str
    ways: Mapping[int, tuple[Tmpc, ...]]


@dataclass(frozen=True, slots=True)
class PiperEdge:
    """A result that one operator hands to another.

    Attributes:
        source: id of the operator that makes it.
        target: id of the operator that reads it.
        size_bytes: its bytes per sample, in one direction.
    """

    source: int
    target: int
    size_bytes: float


@dataclass(frozen=True)
class PiperInstance:
    """What Piper plans.

    Attributes:
        operators: in topological order.
        edges: without repetition.
        num_devices: devices to plan for [k].
        memory_bytes: memory of a device [M].
        bandwidth_bytes_per_s: from any device to the others.
        num_samples: samples (Piper's micro-batches) of a mini-batch [N].
    """

    operators: tuple[PiperOperator, ...]
    edges: tuple[PiperEdge, ...]
    num_devices: int
    memory_bytes: float
    bandwidth_bytes_per_s: float
    num_samples: int


def read_piper_instance(path: str | Path, *, time_unit_s: float | None = None) -> PiperInstance:
    """Piper's own problem, for :func:`lightning_gpp.planner.baselines.piper_search.search`.

    Args:
        path: the file.
        time_unit_s: as in :func:`read_piper_workload`.

    Raises:
        ValueError: the file is missing or broken; the text names the key and what was expected.
    """
    if time_unit_s is not None and not (is_number(time_unit_s) and time_unit_s > 0):
        raise ValueError(f"time_unit_s must be a number above 0 seconds, got {time_unit_s!r}")
    source = Path(path).name
    data = parse_json(read_text(path, EXPECTED), source)
    _check_amounts(data, source)
    document = from_data(_File, data, where=source, may_have_more=True)
    instance = _instance(document, time_unit_s or DEFAULT_TIME_UNIT_S, source)
    if time_unit_s is None:
        _check_unit(instance, source)
    return instance


@dataclass(frozen=True)
class _FileWay:
    """A TMPC as the file has it."""

    id: str
    timePerSample: float
    parameterSize: float
    memoryUsageA: float
    memoryUsageB: float
    syncTimeFw: Mapping[str, float]
    syncTimeBw: Mapping[str, float]


@dataclass(frozen=True)
class _FileNode:
    id: int
    TMPCs: Mapping[str, tuple[_FileWay, ...]]
    name: str | None = None


@dataclass(frozen=True)
class _FileEdge:
    sourceId: int
    destId: int
    communicationCost: float


@dataclass(frozen=True)
class _File:
    nodes: tuple[_FileNode, ...]
    edges: tuple[_FileEdge, ...]
    maxDevices: int
    maxMemoryPerDevice: float
    bandwidth: float
    maxBatchSize: int | None = None
    mbsInBatch: int | None = None


def _check_amounts(data: Any, where: str) -> None:
    """Refuses negative and implausible numbers, wherever they are; the rest is the form's."""
    if isinstance(data, (list, Mapping)):
        for key, item in data.items() if isinstance(data, Mapping) else enumerate(data):
            _check_amounts(item, f"{where}: {key}" if isinstance(key, str) else f"{where}[{key}]")
    elif isinstance(data, (int, float)) and not 0 <= data <= LARGEST:
        raise ValueError(f"{where}: expected a number of at least 0, got {short_repr(data)}")


def _instance(document: _File, time_unit_s: float, source: str) -> PiperInstance:
    if not document.nodes:
        raise ValueError(f"{source}: nodes: expected at least one, got none")
    operators: dict[int, PiperOperator] = {}
    for index, node in enumerate(document.nodes):
        where = f"{source}: nodes[{index}]"
        if node.id in operators:
            raise ValueError(f"{where}: id {node.id} is there twice; ids are unique")
        ways = {
            degree: tuple(_tmpc(way, time_unit_s, where) for way in found)
            for degree, found in _numbered(node.TMPCs, f"{where}: TMPCs").items()
        }
        if not any(ways.values()):
            raise ValueError(f"{where}: TMPCs: expected at least one way to run the operator")
        operators[node.id] = PiperOperator(node.id, node.name or str(node.id), ways)
    names = unique_names(operators.values())
    readers: dict[str, list[str]] = {name: [] for name in names.values()}
    edges: dict[tuple[int, int], PiperEdge] = {}
    for index, edge in enumerate(document.edges):
        ends, where = (edge.sourceId, edge.destId), f"{source}: edges[{index}]"
        if unknown := [number for number in ends if number not in operators]:
            raise ValueError(f"{where}: no node has the id {unknown[0]}")
        if ends in edges:
            raise ValueError(f"{where}: the edge {ends[0]}->{ends[1]} is there twice")
        edges[ends] = PiperEdge(*ends, edge.communicationCost)
        readers[names[ends[0]]].append(names[ends[1]])
    samples = document.mbsInBatch if document.maxBatchSize is None else document.maxBatchSize
    for key, value in (
        ("maxDevices", document.maxDevices),
        ("maxMemoryPerDevice", document.maxMemoryPerDevice),
        ("bandwidth", document.bandwidth),
        ("mbsInBatch", samples),
    ):
        if not value:
            raise ValueError(f"{source}: {key}: expected a number above 0, got {value}")
    place = {name: i for i, name in enumerate(execution_order(readers, source))}
    return PiperInstance(
        operators=tuple(sorted(operators.values(), key=lambda found: place[names[found.id]])),
        edges=tuple(
            sorted(edges.values(), key=lambda e: (place[names[e.source]], place[names[e.target]]))
        ),
        num_devices=document.maxDevices,
        memory_bytes=document.maxMemoryPerDevice,
        bandwidth_bytes_per_s=document.bandwidth,
        num_samples=samples or 0,
    )


def _tmpc(way: _FileWay, time_unit_s: float, where: str) -> Tmpc:
    return Tmpc(
        name=way.id,
        seconds_per_sample=way.timePerSample * time_unit_s,
        parameter_bytes=way.parameterSize,
        memory_bytes_in_flight=way.memoryUsageA,
        memory_bytes_fixed=way.memoryUsageB,
        sync_forward_bytes=_numbered(way.syncTimeFw, f"{where}: syncTimeFw"),
        sync_backward_bytes=_numbered(way.syncTimeBw, f"{where}: syncTimeBw"),
    )


def _numbered(items: Mapping[str, T], where: str) -> dict[int, T]:
    """By the whole numbers that the keys spell."""
    if wrong := [key for key in items if not key.isdecimal()]:
        raise ValueError(f"{where}: expected whole numbers as keys, got {wrong[0]!r}")
    return {int(key): item for key, item in items.items()}


def _check_unit(instance: PiperInstance, source: str) -> None:
    """Refuses the default unit where memory would be implausibly fast or slow."""
    ways = [tmpc[0] for operator in instance.operators for tmpc in operator.ways.values() if tmpc]
    seconds = sum(way.seconds_per_sample for way in ways)
    size_bytes = sum(way.memory_bytes_in_flight for way in ways)
    low, high = PLAUSIBLE_BYTES_PER_S
    if seconds and size_bytes and not low <= size_bytes / seconds <= high:
        likely = "seconds (time_unit_s=1)" if size_bytes / seconds > high else "microseconds (1e-6)"
        raise ValueError(
            f"{source}: with timePerSample in milliseconds the operators would make "
            f"{size_bytes / seconds:.1e} bytes of activations per second, expected {low:.0e} to "
            f"{high:.0e}; the file is probably in {likely}: give time_unit_s"
        )


def unique_names(operators: Iterable[PiperOperator]) -> dict[int, str]:
    """Names of operators as identifiers; the id makes repeated ones different."""
    operators = list(operators)
    times = Counter(operator.name for operator in operators)
    own = {o.id: o.name for o in operators if o.name.isidentifier() and times[o.name] == 1}
    taken = set(own.values())
    for operator in operators:
        if operator.id not in own:
            name = f"node{operator.id}"
            while name in taken:
                name += "_"
            own[operator.id] = name
            taken.add(name)
    return {operator.id: own[operator.id] for operator in operators}


def read_piper_workload(
    path: str | Path, *, time_unit_s: float | None = None, samples: int = 1
) -> Workload:
    """A workload from an input of Piper, without tensor parallelism.

    Args:
        path: the file.
        time_unit_s: seconds in one unit of ``timePerSample``; milliseconds if not given, and an
            error where those make no sense.
        samples: how many samples one of Piper's "samples" stands for (``resnet.json``: 128
            images). Micro-batches can be as small as one sample, so 1, the default, means that
            Piper's are not divided.

    Raises:
        ValueError: the file is missing or broken (the text names the key and what was expected), or
            an operator cannot run on one device.
    """
    check_whole("samples", samples)
    instance = read_piper_instance(path, time_unit_s=time_unit_s)
    names = unique_names(instance.operators)
    first = Value("samples", (TensorSpec((samples, 0), "int64", batch_dim=0),))
    made: dict[int, dict[float, str]] = {number: {} for number in names}
    reads: dict[int, list[str]] = {number: [] for number in names}
    for edge in instance.edges:  # readers of equally many bytes share a result
        own = made[edge.source]
        reads[edge.target].append(
            own.setdefault(edge.size_bytes, f"{names[edge.source]}_out{len(own) or ''}")
        )
    costs, operators, parameters = {}, [], []
    for operator in instance.operators:
        name, ways = names[operator.id], _plain_ways(operator, Path(path).name)
        costs[name] = _op_profile(ways)
        weight = Parameter(f"{name}.weight", round(ways[0].parameter_bytes))
        parameters += [weight] if weight.size_bytes else []
        results = made[operator.id] or {0.0: f"{name}_out"}
        operators.append(
            OpNode(
                name=name,
                target=operator.name,
                scope=scope_of(name),
                inputs=tuple(reads[operator.id]) or (first.name,),
                outputs=tuple(batch_value(n, (size,), samples) for size, n in results.items()),
                parameters=(weight.name,) if weight.size_bytes else (),
            )
        )
    graph = ModelGraph(
        inputs=(GraphInput(first),),
        operators=tuple(operators),
        outputs=tuple(f"{names[number]}_out" for number, own in made.items() if not own),
        parameters=tuple(parameters),
    )
    profile = Profile(costs, microbatch_size=samples, device=ANY_DEVICE)
    per_device = -(-instance.num_samples // instance.num_devices)
    most = samples * min(MAX_SAMPLES_PER_DEVICE, per_device)
    return Workload(Path(path).stem, graph, Costs((profile,)), most, SOURCE)


def _plain_ways(operator: PiperOperator, source: str) -> tuple[Tmpc, ...]:
    """The ways to run an operator on one device, the fastest first."""
    ways = operator.ways.get(1, ())
    if not ways:
        raise ValueError(
            f"{source}: operator {operator.name!r} needs tensor parallelism (TMPCs of degrees "
            f"{sorted(operator.ways)}), which plans of a model graph do not have"
        )
    return tuple(sorted(ways, key=lambda way: way.seconds_per_sample))


def _op_profile(ways: tuple[Tmpc, ...]) -> OpProfile:
    """Recomputing runs the forward once more, which tells forward and backward apart."""
    seconds = ways[0].seconds_per_sample
    forward_s = ways[-1].seconds_per_sample - seconds
    if not 0 < forward_s <= seconds:
        forward_s = seconds * FORWARD_SHARE
    return OpProfile(forward_s, seconds - forward_s, round(ways[0].memory_bytes_in_flight))
