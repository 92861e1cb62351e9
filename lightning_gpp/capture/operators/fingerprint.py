"""A hash of the structure of a captured model, equal in every process that captured the same."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from lightning_gpp.capture.operators.normalize import function_name
from lightning_gpp.capture.tracing.trace import Call, Trace
from lightning_gpp.capture.values.structure import Structure, flatten


def fingerprint(traces: Iterable[Trace], rest: Any) -> str:
    """Hash of the traces and of ``rest``; weights do not count, constants do."""
    contents = [(node_contents(trace), str(trace.output)) for trace in traces]
    return hashlib.sha256(f"{contents} {constant_text(rest)}".encode()).hexdigest()[:16]


class NodeContent(NamedTuple):
    """What tells a node from others of the same trace, in whatever order they are.

    Attributes:
        name: of the node.
        content: a hash of all that its value is computed from.
        reads: names of the nodes among its arguments.
        calls: of modules that were running.
    """

    name: str
    content: str
    reads: tuple[str, ...]
    calls: tuple[Call, ...]


def node_contents(trace: Trace) -> tuple[NodeContent, ...]:
    """Of all nodes, the output included."""
    contents: dict[str, NodeContent] = {}
    for node in trace.graph.nodes:
        reads = list[str]()

        def read(arg: fx.Node, reads: list[str] = reads) -> str:
            reads.append(arg.name)
            return f"%{contents[arg.name].content}"

        given = constant_text(fx.node.map_arg([node.args, node.kwargs], read))
        text = f"{node.op} {function_name(node)} {given}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        calls = node.meta.get("calls", ())
        contents[node.name] = NodeContent(node.name, digest, tuple(reads), calls)
    return tuple(contents.values())


def constant_text(value: Any) -> str:
    """Text of a constant that does not depend on addresses."""
    leaves, structure = flatten(value)
    if structure.container is not None:
        return f"{structure}({', '.join(map(constant_text, leaves))})"
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, slice):
        return f"slice({constant_text([value.start, value.stop, value.step])})"
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"{value.dtype}{tuple(value.shape)}{hashlib.sha256(content).hexdigest()}"
    if isinstance(value, Structure):
        return str(value)
    if isinstance(value, torch.device):
        return "device"  # ranks capture on their own
    if isinstance(value, nn.Module):
        return f"{type(value).__module__}.{type(value).__qualname__}"
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value))}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
