"""Reads the profiles of PipeDream (``graph.txt`` of its profiler).

One line per operator, ``node4 -- Conv2d(…) -- forward_compute_time=…, backward_compute_time=…,
activation_size=…, parameter_size=…``, then one indented line per edge, ``node4 -- node5``. Times
are milliseconds and sizes are bytes, both of one profiled mini-batch; an ``activation_size`` may be
a list, ``[a; b]``, one for each tensor of the result. Format: github msr-fiddle/pipedream.

As PipeDream's own planner does, inputs (``Input…``) are taken out, since nothing can be decided
about them, and so are look-ups (``__getitem__(k)``) that nobody reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_gpp.common.checks import short_list
from lightning_gpp.common.data_file import read_text
from lightning_gpp.cost import ANY_DEVICE, Costs, OpProfile, Profile
from lightning_gpp.graph import GraphInput, ModelGraph, OpNode, Parameter, Value
from lightning_gpp.workloads.files import (
    batch_value,
    check_samples,
    execution_order,
    quantity,
    scope_of,
)
from lightning_gpp.workloads.profiled_samples import profiled_samples
from lightning_gpp.workloads.workload import Workload

EXPECTED = "a profile of PipeDream (graph.txt)"
SOURCE = "PipeDream (SOSP 2019), github msr-fiddle/pipedream"
SECONDS_PER_MILLISECOND = 1e-3
QUANTITIES = (
    "forward_compute_time",
    "backward_compute_time",
    "activation_size",
    "parameter_size",
)


@dataclass(frozen=True, slots=True)
class ProfiledNode:
    """One operator of a profile.

    Attributes:
        name: ``node4``.
        description: the module, as PyTorch prints it.
        forward_s: seconds of its forward for the profiled mini-batch.
        backward_s: seconds of its backward.
        output_bytes: bytes of each tensor of its result.
        parameter_bytes: bytes of its parameters.
    """

    name: str
    description: str
    forward_s: float
    backward_s: float
    output_bytes: tuple[float, ...]
    parameter_bytes: float

    @property
    def is_input(self) -> bool:
        """Whether it stands for an argument of the model."""
        return self.description.startswith("Input")

    @property
    def is_look_up(self) -> bool:
        """Whether it takes one item out of a result."""
        return self.description.startswith("__getitem__")


@dataclass(frozen=True)
class ProfiledGraph:
    """A profile as it stands in the file.

    Attributes:
        nodes: operators by name.
        readers: name -> operators that read its result.
    """

    nodes: Mapping[str, ProfiledNode]
    readers: Mapping[str, tuple[str, ...]]


def read_pipedream_profile(path: str | Path, *, samples: int | None = None) -> Workload:
    """A workload from a profile of PipeDream.

    Args:
        path: the file.
        samples: samples of the profiled mini-batch, which the file does not tell. If not given it
            is worked out where a size in the file shows it
            (:mod:`lightning_gpp.workloads.profiled_samples`).

    Raises:
        ValueError: the file is missing or broken (the text names the line and what was expected),
            or the number of samples cannot be worked out.
    """
    check_samples(samples)
    source = Path(path).name
    profiled = parse_profile(read_text(path, EXPECTED), source=source)
    order = execution_order(profiled.readers, source)
    samples = samples or profiled_samples(
        ((node.description, node.output_bytes) for node in profiled.nodes.values()), source
    )
    graph = _model_graph(profiled, order, samples)
    kept = [profiled.nodes[operator.name] for operator in graph]
    return Workload(
        name=Path(path).stem,
        graph=graph,
        costs=Costs((_profile(kept, samples),)),
        samples_per_device=samples,
        source=SOURCE,
    )


def parse_profile(text: str, *, source: str) -> ProfiledGraph:
    """The operators and edges of a profile.

    Args:
        text: the file.
        source: its name, for errors.

    Raises:
        ValueError: the text is not a profile.
    """
    nodes: dict[str, ProfiledNode] = {}
    edges: dict[tuple[str, str], str] = {}
    for where, line in _lines(text, source):
        if line[0].isspace():
            edges[_edge(line, where)] = where
            continue
        node = _node(line, where)
        if node.name in nodes:
            raise ValueError(f"{where}: operator {node.name!r} is there twice; names are unique")
        nodes[node.name] = node
    if all(node.is_input for node in nodes.values()):
        raise ValueError(f"{source}: no operator; expected {EXPECTED}")
    _check_connected(nodes, edges, source)
    readers: dict[str, list[str]] = {name: [] for name in nodes}
    for (reader_of, reader), where in edges.items():
        for name in (reader_of, reader):
            if name not in nodes:
                raise ValueError(f"{where}: an edge names {name!r}, but no line describes it")
        readers[reader_of].append(reader)
    return ProfiledGraph(nodes, {name: tuple(targets) for name, targets in readers.items()})


def _check_connected(
    nodes: Mapping[str, ProfiledNode], edges: Iterable[tuple[str, str]], source: str
) -> None:
    """Refuses operators without any edge: profilers write none, but files are cut off."""
    ends = {name for edge in edges for name in edge}
    alone = [name for name in nodes if name not in ends]
    if len(nodes) > 1 and alone:
        raise ValueError(
            f"{source}: no edge names {short_list(alone)}; "
            "expected a line '<tab>nodeA -- nodeB' for every edge: the file may be cut off"
        )


def _lines(text: str, source: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield f"{source}, line {number}", line


def _edge(line: str, where: str) -> tuple[str, str]:
    ends = [end.strip() for end in line.split("--")]
    if len(ends) != 2 or not all(ends) or ends[0] == ends[1]:
        raise ValueError(f"{where}: expected an edge 'nodeA -- nodeB', got {_short(line)}")
    return ends[0], ends[1]


def _node(line: str, where: str) -> ProfiledNode:
    name, _, rest = line.partition(" -- ")
    description, _, numbers = rest.rpartition(" -- ")
    if not (description and name.isidentifier()):
        raise ValueError(
            f"{where}: expected 'node -- description -- {'=…, '.join(QUANTITIES)}=…', "
            f"got {_short(line)}"
        )
    found = _quantities(numbers, where)
    forward_s, backward_s = (
        quantity(found[key], f"{where}: {key}") * SECONDS_PER_MILLISECOND for key in QUANTITIES[:2]
    )
    return ProfiledNode(
        name=name,
        description=description,
        forward_s=forward_s,
        backward_s=backward_s,
        output_bytes=_sizes(found["activation_size"], f"{where}: activation_size"),
        parameter_bytes=quantity(found["parameter_size"], f"{where}: parameter_size"),
    )


def _quantities(numbers: str, where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in numbers.split(","):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{where}: expected 'quantity=number', got {_short(item)}")
        if key.strip() in found:
            raise ValueError(f"{where}: {key.strip()} is there twice; keep one")
        found[key.strip()] = value
    if missing := [key for key in QUANTITIES if key not in found]:
        raise ValueError(f"{where}: {missing[0]} is missing; expected {', '.join(QUANTITIES)}")
    return found


def _sizes(text: str, where: str) -> tuple[float, ...]:
    """One size, or a list ``[a; b]`` of sizes."""
    found = re.fullmatch(r"\s*\[(.*)\]\s*", text)
    items = found.group(1).split(";") if found else [text]
    return tuple(quantity(item, where) for item in items)


def _is_dropped(profiled: ProfiledGraph, name: str) -> bool:
    node = profiled.nodes[name]
    return node.is_input or (node.is_look_up and not profiled.readers[name])


def _model_graph(profiled: ProfiledGraph, order: list[str], samples: int) -> ModelGraph:
    def result(name: str) -> Value:
        return batch_value(f"{name}_out", profiled.nodes[name].output_bytes, samples)

    kept = [name for name in order if not _is_dropped(profiled, name)]
    reads: dict[str, list[str]] = {name: [] for name in order}
    for name in order:
        for reader in profiled.readers[name]:
            reads[reader].append(f"{name}_out")
    return ModelGraph(
        inputs=tuple(GraphInput(result(n)) for n in order if profiled.nodes[n].is_input),
        operators=tuple(
            OpNode(
                name=name,
                target=_target(profiled.nodes[name].description),
                scope=scope_of(name),
                inputs=tuple(reads[name]),
                outputs=(result(name),),
                parameters=tuple(p.name for p in _parameters(profiled.nodes[name])),
            )
            for name in kept
        ),
        outputs=tuple(
            f"{name}_out" for name in kept if not set(profiled.readers[name]).intersection(kept)
        ),
        parameters=tuple(p for name in kept for p in _parameters(profiled.nodes[name])),
    )


def _parameters(node: ProfiledNode) -> tuple[Parameter, ...]:
    size_bytes = round(node.parameter_bytes)
    return (Parameter(f"{node.name}.weight", size_bytes),) if size_bytes else ()


def _profile(nodes: list[ProfiledNode], samples: int) -> Profile:
    return Profile(
        {
            node.name: OpProfile(
                forward_s=node.forward_s,
                backward_s=node.backward_s,
                activation_bytes=round(sum(node.output_bytes)),
            )
            for node in nodes
        },
        microbatch_size=samples,
        device=ANY_DEVICE,
    )


def _target(description: str) -> str:
    """``Conv2d`` of ``Conv2d(3, 64, kernel_size=(3, 3))``."""
    return description.partition("(")[0].strip()


def _short(line: str) -> str:
    text = line.strip()
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
