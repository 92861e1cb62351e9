"""What a captured model and its modules are, as texts that are equal in every process.

And the order in which one process found the nodes, in another that goes through sets otherwise:
Python draws the order of a set of strings anew in every process, so that a forward which goes
through one (ModernBERT computes a table per kind of attention so) calls the same in another order.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from lightning_gpp.capture.errors import CaptureError
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


def in_order(traces: Mapping[bool, Trace], nodes: Sequence[NodeContent]) -> dict[bool, Trace]:
    """The traces of both modes with the order and the names of the nodes of another process.

    What nodes did is not known of them: nodes that are alike change memory of their own.

    Args:
        traces: normalized; are left as they are.
        nodes: of its trace in training.

    Raises:
        CaptureError: it has other nodes.
    """
    own = node_contents(traces[True])
    if own == tuple(nodes):
        return dict(traces)
    if Counter(node.content for node in own) != Counter(node.content for node in nodes):
        raise CaptureError(
            "this process captured another model than the one that was checked: all must "
            "build the same model and take the same path through its forward (a set of strings has "
            "another order in every process: go through it sorted)"
        )
    alike = {node.content: node.name for node in own}
    ordered = {}
    for mode, trace in traces.items():
        found = {node.name: node for node in trace.graph.nodes}
        graph, copied = fx.Graph(), dict[str, fx.Node]()
        for node in nodes:
            like, reads = found[alike[node.content]], map(copied.__getitem__, node.reads)
            given = fx.node.map_arg((like.args, like.kwargs), partial(_next, reads))
            copied[node.name] = graph.create_node(like.op, like.target, *given, name=node.name)
            copied[node.name].meta.update(like.meta, calls=node.calls)
        ordered[mode] = Trace(graph, trace.output, trace.calls)
    return ordered


def _next(reads: Iterator[fx.Node], _: fx.Node) -> fx.Node:
    return next(reads)


# Modules: the fingerprint of a captured model is that of its graph, in which leaf modules are names

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def module_content(module: nn.Module) -> str:
    """Equal in every process for modules of equal types, code, settings and training flags.

    Settings are the plain attributes (numbers, texts, and tuples and lists of them) and what a
    module's ``repr`` shows. Functions that methods call are not looked into.
    """
    digest = hashlib.sha256()
    code = {kind: _code_of(kind) for kind in {type(part) for part in module.modules()}}
    for name, part in module.named_modules():
        kind, text = type(part), re.sub(r" at 0x[0-9a-f]+", "", part.extra_repr())
        settings = sorted(
            (key, value)
            for key, value in vars(part).items()
            if not key.startswith("_") and key != "training" and _is_plain(value)
        )
        digest.update(f"{name} {kind.__module__}.{kind.__qualname__} {part.training}\n".encode())
        digest.update(f"{text} {settings}\n{code[kind]}".encode())
    return digest.hexdigest()[:32]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _code_of(kind: type) -> str:
    """Hash of the functions of a module type and its bases, torch's own left out."""
    digest = hashlib.sha256()
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in ("torch", "builtins"):
            for name, member in sorted(vars(base).items()):
                code = getattr(getattr(member, "__func__", member), "__code__", None)
                if isinstance(code, CodeType):
                    digest.update(f"{name} {' '.join(_texts(code))}\n".encode())
    return digest.hexdigest()


def _texts(code: CodeType) -> Iterator[str]:
    """What a function does; line numbers and file names play no part."""
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames}"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _texts(constant)
        elif isinstance(constant, frozenset):  # in an order that changes from process to process
            yield f"{sorted(map(repr, constant))}"
        else:
            yield repr(constant)
