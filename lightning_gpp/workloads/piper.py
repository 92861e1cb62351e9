"""Reads Piper's inputs (JSON): its planning problem, and the workload in it.

Source: "Piper: Multidimensional Planner for DNN Parallelization" (NeurIPS 2021), section 3. A
*TMPC* (time, memory, parameters, communication) is one way to run an operator on a number of
devices, for example with its activations kept or computed again.

The format is described in the README of github msr-fiddle/piper. It names no unit of time, and the
published files do not agree: ``resnet.json`` holds milliseconds (its sums equal PipeDream's
profile), ``bert32a100.json`` seconds, while both give the bandwidth in bytes per second. So the
unit is an argument that has to be given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_gpp.common.checks import LARGEST, check_whole, is_number, short_repr
from lightning_gpp.common.data_file import read_text
from lightning_gpp.common.strict_json import from_data, parse_json
from lightning_gpp.cost import ANY_DEVICE, Costs, OpProfile, Profile
from lightning_gpp.graph import GraphInput, ModelGraph, OpNode, Parameter, TensorSpec, Value
from lightning_gpp.workloads.fields import batch_value, execution_order, scope_of
from lightning_gpp.workloads.workload import Workload

SOURCE = "Piper (NeurIPS 2021), github msr-fiddle/piper"

FORWARD_SHARE = 1 / 3
"""Of the time of forward and backward, where nothing tells them apart."""

MAX_SAMPLES_PER_DEVICE = 16
"""A mini-batch for every device. Piper's own are hundreds of times that and only make its
synchronisation cheap; so many fill a pipeline, and a program of them is still quickly played."""

EXPECTED = "an input of Piper (JSON)"


@dataclass(frozen=True, slots=True)
class Tmpc:
    """One way to run an operator on one device; Piper's symbols in brackets.

    Attributes:
        seconds_per_sample: forward and backward [p].
        parameter_bytes: weights to synchronise between data-parallel copies [w].
        memory_bytes_in_flight: memory for every sample in flight [a].
        memory_bytes_fixed: memory beside that [b].
    """

    seconds_per_sample: float
    parameter_bytes: float
    memory_bytes_in_flight: float
    memory_bytes_fixed: float


@dataclass(frozen=True, slots=True)
class PiperOperator:
    """An operator.

    Attributes:
        id: its number in the file.
        name: for people.
        ways: to run it, the fastest first.
    """

    id: int
    name: str
    ways: tuple[Tmpc, ...]


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
    """Piper's planning problem.

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


@dataclass(frozen=True)
class _FileWay:
    """A TMPC as the file has it."""

    timePerSample: float
    parameterSize: float
    memoryUsageA: float
    memoryUsageB: float


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


def read_piper_instance(path: str | Path, *, time_unit_s: float | None = None) -> PiperInstance:
    """Piper's own problem, for :func:`lightning_gpp.planner.baselines.piper_search.search`.

    Args:
        path: the file.
        time_unit_s: as in :func:`read_piper_workload`.

    Raises:
        ValueError: the file is missing or broken (the text names the key and what was expected), or
            an operator cannot run on one device.
    """
    source = Path(path).name
    data = parse_json(read_text(path, EXPECTED), source)
    _check_amounts(data, source)
    file = from_data(_File, data, where=source, may_have_more=True)
    if time_unit_s is None or not (is_number(time_unit_s) and time_unit_s > 0):
        raise ValueError(
            f"{source}: Piper's files do not name their unit of time: give time_unit_s, its "
            "seconds (0.001 for resnet.json, 1 for bert32a100.json), a number above 0; got "
            f"{time_unit_s!r}"
        )
    samples = file.mbsInBatch if file.maxBatchSize is None else file.maxBatchSize
    needed = {"nodes": file.nodes, "maxDevices": file.maxDevices, "bandwidth": file.bandwidth}
    needed |= {"maxMemoryPerDevice": file.maxMemoryPerDevice, "mbsInBatch": samples}
    for key, value in needed.items():
        if not value:
            raise ValueError(f"{source}: {key}: expected a number above 0, got {value or 0}")
    operators = {node.id: _operator(node, time_unit_s, source) for node in file.nodes}
    edges = {
        (e.sourceId, e.destId): PiperEdge(e.sourceId, e.destId, e.communicationCost)
        for e in file.edges
    }
    if len(operators) < len(file.nodes) or len(edges) < len(file.edges):
        raise ValueError(f"{source}: a node's id or an edge is there twice; keep one")
    names = _names([*operators.values()])
    readers: dict[str, list[str]] = {name: [] for name in names.values()}
    for pair in edges:
        if unknown := [number for number in pair if number not in operators]:
            raise ValueError(f"{source}: edge {pair[0]}->{pair[1]}: no node has id {unknown[0]}")
        readers[names[pair[0]]].append(names[pair[1]])
    order = execution_order(readers, source)
    place = {number: order.index(name) for number, name in names.items()}
    return PiperInstance(
        operators=tuple(sorted(operators.values(), key=lambda found: place[found.id])),
        edges=tuple(sorted(edges.values(), key=lambda e: (place[e.source], place[e.target]))),
        num_devices=file.maxDevices,
        memory_bytes=file.maxMemoryPerDevice,
        bandwidth_bytes_per_s=file.bandwidth,
        num_samples=samples or 0,
    )


def _check_amounts(data: Any, where: str) -> None:
    """Refuses negative and implausible numbers, wherever they are; the rest is the form's."""
    if isinstance(data, (list, Mapping)):
        for key, item in data.items() if isinstance(data, Mapping) else enumerate(data):
            _check_amounts(item, f"{where}: {key}" if isinstance(key, str) else f"{where}[{key}]")
    elif isinstance(data, (int, float)) and not 0 <= data <= LARGEST:
        raise ValueError(f"{where}: expected a number of at least 0, got {short_repr(data)}")


def _operator(node: _FileNode, time_unit_s: float, source: str) -> PiperOperator:
    """An operator with its ways to run on one device; plans have no tensor parallelism."""
    ways = [
        Tmpc(w.timePerSample * time_unit_s, w.parameterSize, w.memoryUsageA, w.memoryUsageB)
        for w in node.TMPCs.get("1", ())
    ]
    name = node.name or str(node.id)
    if not ways:
        raise ValueError(
            f"{source}: operator {name!r} needs tensor parallelism (TMPCs of degrees "
            f"{', '.join(node.TMPCs) or 'none'}), which plans of a model graph do not have"
        )
    return PiperOperator(node.id, name, tuple(sorted(ways, key=lambda w: w.seconds_per_sample)))


def _names(operators: Sequence[PiperOperator]) -> dict[int, str]:
    """Names of operators as identifiers: their own where all are such, and different."""
    own = {operator.id: operator.name for operator in operators}
    if all(map(str.isidentifier, own.values())) and len({*own.values()}) == len(own):
        return own
    return {number: f"node{number}" for number in own}


def read_piper_workload(
    path: str | Path, *, time_unit_s: float | None = None, samples: int = 1
) -> Workload:
    """Reads an input of Piper, without tensor parallelism, as a workload.

    Args:
        path: the file.
        time_unit_s: seconds in one unit of ``timePerSample``, which has to be given.
        samples: how many samples one of Piper's "samples" stands for (``resnet.json``: 128
            images). Micro-batches can be as small as one sample, so 1, the default, means that
            Piper's are not divided.

    Raises:
        ValueError: the file is missing or broken (the text names the key and what was expected), or
            an operator cannot run on one device.
    """
    check_whole("samples", samples)
    instance = read_piper_instance(path, time_unit_s=time_unit_s)
    names = _names(instance.operators)
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
        name, ways = names[operator.id], operator.ways
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


def _op_profile(ways: tuple[Tmpc, ...]) -> OpProfile:
    """Recomputing runs the forward once more, which tells forward and backward apart."""
    seconds = ways[0].seconds_per_sample
    forward_s = ways[-1].seconds_per_sample - seconds
    if not 0 < forward_s <= seconds:
        forward_s = seconds * FORWARD_SHARE
    return OpProfile(forward_s, seconds - forward_s, round(ways[0].memory_bytes_in_flight))
