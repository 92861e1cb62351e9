"""Identifies captured models and modules by texts that are equal in every process.

And the order in which one process found the nodes, in another that goes through sets otherwise:
Python draws the order of a set of strings anew in every process, so that a forward which goes
through one (ModernBERT computes a table per kind of attention so) calls the same in another order.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_gpp.capture.errors import CaptureError
from lightning_gpp.capture.operators.observe import function_name
from lightning_gpp.capture.tracing.trace import Trace
from lightning_gpp.capture.values.structure import Structure, flatten
from lightning_gpp.common.tensor_places import bits_of

NodeContents = tuple[tuple[str, str, tuple[str, ...]], ...]
"""Of every node its name, a hash of all that its value is computed from, and the nodes it reads."""


def node_contents(trace: Trace) -> NodeContents:
    """Text of every node, the output included."""
    contents: dict[str, str] = {}
    for node in trace.graph.nodes:
        given = fx.node.map_arg([node.args, node.kwargs], lambda arg: f"%{contents[arg.name]}")
        text = f"{node.op} {function_name(node)} {constant_text(given)}"
        contents[node.name] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return tuple((node.name, contents[node.name], _reads(node)) for node in trace.graph.nodes)


def _reads(node: fx.Node) -> tuple[str, ...]:
    found: list[fx.Node] = []
    fx.node.map_arg([node.args, node.kwargs], found.append)
    return tuple(each.name for each in found)


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
        content = bits_of(value.cpu()).numpy().tobytes()
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


def in_order(traces: Mapping[bool, Trace], nodes: NodeContents) -> dict[bool, Trace]:
    """The traces of both modes with the order and the names of the nodes of another process.

    Args:
        traces: normalized; are left as they are.
        nodes: of its trace in training.

    Raises:
        CaptureError: it has other nodes.
    """
    own = node_contents(traces[True])
    if own == nodes:
        return dict(traces)
    try:
        place_of = _places(own, nodes)
        return {mode: _reordered(trace, place_of, nodes) for mode, trace in traces.items()}
    except (KeyError, StopIteration):
        raise CaptureError(
            "this process captured another model than rank 0. All ranks must build the same model "
            "and take the same path through its forward. (A set of strings has another order in "
            "every process: iterate over sorted(...).)"
        ) from None


def _places(own: NodeContents, nodes: NodeContents) -> dict[str, int]:
    """Where the other process has each node; of equal ones, where it has the node that reads it.

    Raises:
        KeyError, StopIteration: it has other nodes.
    """
    place_of_name = {name: place for place, (name, _, _) in enumerate(nodes)}
    with_content: dict[str, list[int]] = {}
    for place, (_, content, _) in enumerate(nodes):
        with_content.setdefault(content, []).append(place)
    found: dict[str, int] = {}
    taken = set[int]()
    for name, content, reads in reversed(own):
        if name not in found:  # nothing reads it
            found[name] = next(p for p in reversed(with_content[content]) if p not in taken)
        _, other_content, other_reads = nodes[found[name]]
        if other_content != content or found[name] in taken:
            raise KeyError(name)
        taken.add(found[name])
        for read, other in zip(reads, other_reads, strict=True):
            found.setdefault(read, place_of_name[other])
    return found


def _reordered(trace: Trace, place_of: Mapping[str, int], nodes: NodeContents) -> Trace:
    graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in sorted(trace.graph.nodes, key=lambda each: place_of[each.name]):
        given = fx.node.map_arg((node.args, node.kwargs), copied.__getitem__)
        name = nodes[place_of[node.name]][0]
        copied[node] = graph.create_node(node.op, node.target, *given, name=name)
        copied[node].meta.update(node.meta)
    return Trace(graph, trace.output, trace.calls)


# Modules: the fingerprint of a captured model is that of its graph, in which leaf modules are names

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def module_content(module: nn.Module) -> str:
    """Equal in every process for modules of equal types, forwards, settings and training flags.

    Settings are the plain attributes (numbers, texts, and tuples and lists of them) and what a
    module's ``repr`` shows. Functions that forwards call are not looked into.
    """
    digest = hashlib.sha256()
    for name, part in module.named_modules():
        kind, text = type(part), re.sub(r" at 0x[0-9a-f]+", "", part.extra_repr())
        settings = sorted(
            (key, value)
            for key, value in vars(part).items()
            if not key.startswith("_") and key != "training" and _is_plain(value)
        )
        forward = inspect.getattr_static(kind, "forward", None)  # a script has none
        code: Any = getattr(getattr(forward, "__wrapped__", forward), "__code__", None)
        does = code and (code.co_code, code.co_names, [*filter(_is_plain, code.co_consts)])
        named = f"{name} {kind.__module__}.{kind.__qualname__} {part.training}"
        digest.update(f"{named}\n{text} {settings}\n{does}".encode())
    return digest.hexdigest()[:32]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN
