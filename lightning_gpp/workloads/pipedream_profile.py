"""Reads the profiles of PipeDream (``graph.txt`` of its profiler).

One line per operator, ``node4 -- Conv2d(…) -- forward_compute_time=…, backward_compute_time=…,
activation_size=…, parameter_size=…``, then one indented line per edge, ``node4 -- node5``. Times
are milliseconds and sizes are bytes, both of one profiled mini-batch; an ``activation_size`` may be
a list, ``[a; b]``, one for each tensor of the result. Format: github msr-fiddle/pipedream.

As PipeDream's own planner does, inputs (``Input…``) are taken out, since nothing can be decided
about them, and so are look-ups (``__getitem__(k)``) that nobody reads.

How many samples a profile was measured with the files do not say, and every rate depends on it, so
it has to be given.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import NamedTuple

from lightning_gpp.common.checks import LARGEST, check_whole, short_repr
from lightning_gpp.common.data_file import read_text
from lightning_gpp.cost import ANY_DEVICE, Costs, OpProfile, Profile
from lightning_gpp.graph import GraphInput, ModelGraph, OpNode, Parameter
from lightning_gpp.workloads.fields import batch_value, execution_order, scope_of
from lightning_gpp.workloads.workload import Workload

EXPECTED = "a profile of PipeDream (graph.txt)"
SOURCE = "PipeDream (SOSP 2019), github msr-fiddle/pipedream"
SECONDS_PER_MILLISECOND = 1e-3
QUANTITIES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


class ProfiledNode(NamedTuple):
    """One operator of a profile.

    Attributes:
        name: ``node4``.
        description: the module, as PyTorch prints it.
        forward_s: seconds of its forward for the profiled mini-batch.
        backward_s: seconds of its backward.
        output_bytes: bytes of each tensor of its result.
        parameter_bytes: bytes of its parameters.
        readers: operators that read its result.
    """

    name: str
    description: str
    forward_s: float
    backward_s: float
    output_bytes: tuple[float, ...]
    parameter_bytes: int
    readers: list[str]

    @property
    def is_input(self) -> bool:
        """Whether it stands for an argument of the model."""
        return self.description.startswith("Input")

    @property
    def is_kept(self) -> bool:
        """Whether there is something to decide about it."""
        is_look_up = self.description.startswith("__getitem__")
        return not (self.is_input or (is_look_up and not self.readers))

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Its parameters as one."""
        size_bytes = self.parameter_bytes
        return (Parameter(f"{self.name}.weight", size_bytes),) if size_bytes else ()


def read_pipedream_profile(path: str | Path, *, samples: int | None = None) -> Workload:
    """Reads a profile of PipeDream as a workload.

    Args:
        path: the file.
        samples: samples of the profiled mini-batch, which have to be given.

    Raises:
        ValueError: the file is missing or broken (the text names the line and what was expected),
            or the number of samples is not given.
    """
    source = Path(path).name
    found = parse_profile(read_text(path, EXPECTED), source=source)
    if samples is None:
        raise ValueError(
            f"{source}: a profile does not tell how many samples it was measured with: give "
            "samples=... (PipeDream's own: 128 images, 256 of squeezenet, 32 sentences of gnmt)"
        )
    check_whole("samples", samples)
    names = execution_order({name: node.readers for name, node in found.items()}, source)
    nodes = [found[name] for name in names]
    kept = {node.name: node for node in nodes if node.is_kept}
    values = {
        node.name: batch_value(f"{node.name}_out", node.output_bytes, samples) for node in nodes
    }
    reads: dict[str, list[str]] = {name: [] for name in names}
    for node in nodes:
        for reader in node.readers:
            reads[reader].append(f"{node.name}_out")
    graph = ModelGraph(
        inputs=tuple(GraphInput(values[node.name]) for node in nodes if node.is_input),
        operators=tuple(
            OpNode(
                name=name,
                target=node.description.partition("(")[0].strip(),
                scope=scope_of(name),
                inputs=tuple(reads[name]),
                outputs=(values[name],),
                parameters=tuple(parameter.name for parameter in node.parameters),
            )
            for name, node in kept.items()
        ),
        outputs=tuple(
            f"{name}_out" for name, node in kept.items() if not kept.keys() & node.readers
        ),
        parameters=tuple(parameter for node in kept.values() for parameter in node.parameters),
    )
    costs = {
        name: OpProfile(node.forward_s, node.backward_s, round(sum(node.output_bytes)))
        for name, node in kept.items()
    }
    profile = Profile(costs, microbatch_size=samples, device=ANY_DEVICE)
    return Workload(Path(path).stem, graph, Costs((profile,)), samples, SOURCE)


def parse_profile(text: str, *, source: str) -> dict[str, ProfiledNode]:
    """The operators of a profile by name.

    Args:
        text: the file.
        source: its name, for errors.

    Raises:
        ValueError: the text is not a profile.
    """
    nodes: dict[str, ProfiledNode] = {}
    edges: dict[tuple[str, str], str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{source}, line {number}"
        if line[:1].isspace() and line.strip():
            edges[_edge(line, where)] = where
        elif line.strip():
            node = _node(line, where)
            if node.name in nodes:
                raise ValueError(
                    f"{where}: operator {node.name!r} is there twice; names are unique"
                )
            nodes[node.name] = node
    if all(node.is_input for node in nodes.values()):
        raise ValueError(f"{source}: no operator; expected {EXPECTED}")
    for (name, reader), where in edges.items():
        for end in (name, reader):
            if end not in nodes:
                raise ValueError(f"{where}: an edge names {end!r}, but no line describes it")
        nodes[name].readers.append(reader)
    return nodes


def _edge(line: str, where: str) -> tuple[str, str]:
    ends = [end.strip() for end in line.split("--")]
    if len(ends) != 2 or not all(ends) or ends[0] == ends[1]:
        raise ValueError(
            f"{where}: expected an edge 'nodeA -- nodeB', got {short_repr(line.strip())}"
        )
    return ends[0], ends[1]


def _node(line: str, where: str) -> ProfiledNode:
    name, _, rest = line.partition(" -- ")
    description, _, numbers = rest.rpartition(" -- ")
    found = dict(re.findall(r"(\w+)=\s*(\[[^]]*\]|[^,]*)", numbers))
    if not (description and name.isidentifier() and {*QUANTITIES} <= found.keys()):
        raise ValueError(
            f"{where}: expected 'node -- description -- {'=…, '.join(QUANTITIES)}=…', "
            f"got {short_repr(line.strip())}"
        )
    forward_ms, backward_ms, output_bytes, parameter_bytes = (
        [_quantity(text, f"{where}: {key}") for text in found[key].strip(" []").split(";")]
        for key in QUANTITIES
    )
    return ProfiledNode(
        name,
        description,
        forward_ms[0] * SECONDS_PER_MILLISECOND,
        backward_ms[0] * SECONDS_PER_MILLISECOND,
        tuple(output_bytes),
        round(parameter_bytes[0]),
        [],
    )


def _quantity(text: str, where: str) -> float:
    """A number that is not negative (and no more than any real quantity)."""
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= LARGEST:
            return float(text)
    raise ValueError(f"{where}: expected a number of at least 0, got {text.strip()!r}")
