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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_gpp.common.checks import check_whole, is_number
from lightning_gpp.common.data_file import read_text
from lightning_gpp.cost import ANY_DEVICE, Costs, OpProfile, Profile
from lightning_gpp.graph import GraphInput, ModelGraph, OpNode, Parameter, TensorSpec, Value
from lightning_gpp.workloads.fields import JsonObject, batch_value, execution_order, scope_of
from lightning_gpp.workloads.workload import Workload

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
    document = JsonObject.load(read_text(path, EXPECTED), source)
    instance = _instance(document, time_unit_s or DEFAULT_TIME_UNIT_S)
    if time_unit_s is None:
        _check_unit(instance, source)
    return instance


def _instance(document: JsonObject, time_unit_s: float) -> PiperInstance:
    operators = _operators(document, time_unit_s)
    edges = tuple(_edges(document, operators))
    names = unique_names(operators.values())
    readers: dict[str, list[str]] = {name: [] for name in names.values()}
    for edge in edges:
        readers[names[edge.source]].append(names[edge.target])
    place = {name: i for i, name in enumerate(execution_order(readers, document.where))}
    samples_key = "maxBatchSize" if "maxBatchSize" in document.data else "mbsInBatch"
    for key in ("maxDevices", samples_key):
        document.positive(key)
    return PiperInstance(
        operators=tuple(sorted(operators.values(), key=lambda found: place[names[found.id]])),
        edges=tuple(
            sorted(edges, key=lambda edge: (place[names[edge.source]], place[names[edge.target]]))
        ),
        num_devices=document.integer("maxDevices"),
        memory_bytes=document.positive("maxMemoryPerDevice"),
        bandwidth_bytes_per_s=document.positive("bandwidth"),
        num_samples=document.integer(samples_key),
    )


def _operators(document: JsonObject, time_unit_s: float) -> dict[int, PiperOperator]:
    found: dict[int, PiperOperator] = {}
    for node in document.objects("nodes"):
        number = node.integer("id")
        if number in found:
            raise ValueError(f"{node.where}: id {number} is there twice; ids are unique")
        name = node.text("name") if "name" in node.data else str(number)
        ways = node.child("TMPCs")
        found[number] = PiperOperator(
            number,
            name,
            {
                degree: tuple(_tmpc(way, time_unit_s) for way in ways.objects(key))
                for degree, key in ways.numbered_keys()
            },
        )
        if not any(found[number].ways.values()):
            raise ValueError(f"{ways.where}: expected at least one way to run the operator")
    if not found:
        raise ValueError(f"{document.where}: nodes: expected at least one, got none")
    return found


def _tmpc(way: JsonObject, time_unit_s: float) -> Tmpc:
    return Tmpc(
        name=way.text("id"),
        seconds_per_sample=way.number("timePerSample") * time_unit_s,
        parameter_bytes=way.number("parameterSize"),
        memory_bytes_in_flight=way.number("memoryUsageA"),
        memory_bytes_fixed=way.number("memoryUsageB"),
        sync_forward_bytes=_by_operator(way.child("syncTimeFw")),
        sync_backward_bytes=_by_operator(way.child("syncTimeBw")),
    )


def _by_operator(sizes: JsonObject) -> dict[int, float]:
    return {number: sizes.number(key) for number, key in sizes.numbered_keys()}


def _edges(document: JsonObject, operators: Mapping[int, PiperOperator]) -> Iterator[PiperEdge]:
    seen = set()
    for item in document.objects("edges"):
        edge = PiperEdge(
            item.integer("sourceId"), item.integer("destId"), item.number("communicationCost")
        )
        for number in (edge.source, edge.target):
            if number not in operators:
                raise ValueError(f"{item.where}: no node has the id {number}")
        if (edge.source, edge.target) in seen:
            raise ValueError(f"{item.where}: the edge {edge.source}->{edge.target} is there twice")
        seen.add((edge.source, edge.target))
        yield edge


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
