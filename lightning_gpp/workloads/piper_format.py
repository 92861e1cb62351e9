"""Reads the inputs of Piper (JSON).

The format is described in the README of github msr-fiddle/piper. It names no unit of time, and the
published files do not agree: ``resnet.json`` holds milliseconds (its sums equal PipeDream's
profile), ``bert32a100.json`` seconds, while both give the bandwidth in bytes per second. So the
unit is an argument, and if it is not given, what the default makes of the file is held against
what memory can do (:data:`PLAUSIBLE_BYTES_PER_S`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from lightning_gpp.common.checks import is_number
from lightning_gpp.common.data_file import read_text
from lightning_gpp.workloads.files import execution_order
from lightning_gpp.workloads.json_fields import JsonObject, load_object
from lightning_gpp.workloads.piper_instance import (
    PiperEdge,
    PiperInstance,
    PiperOperator,
    Tmpc,
)

EXPECTED = "an input of Piper (JSON)"
DEFAULT_TIME_UNIT_S = 1e-3
"""Milliseconds, as in ``resnet.json``."""

PLAUSIBLE_BYTES_PER_S = (2e8, 5e12)
"""Bytes of activations made per second of compute; the published files have 2e10 to 4e10."""


def read_piper_instance(path: str | Path, *, time_unit_s: float | None = None) -> PiperInstance:
    """Piper's own problem, for :func:`lightning_gpp.planner.piper.plan_instance`.

    Args:
        path: the file.
        time_unit_s: as in :func:`read_piper_workload`.

    Raises:
        ValueError: the file is missing or broken; the text names the key and what was expected.
    """
    if time_unit_s is not None and not (is_number(time_unit_s) and time_unit_s > 0):
        raise ValueError(f"time_unit_s must be a number above 0 seconds, got {time_unit_s!r}")
    source = Path(path).name
    document = load_object(read_text(path, EXPECTED), source)
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
