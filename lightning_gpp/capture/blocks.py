"""Capture by hand: the user describes the forward as calls of sub-modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from lightning_gpp.capture.errors import CaptureError
from lightning_gpp.capture.tracing.trace import Recorder, Trace
from lightning_gpp.capture.values.arguments import Arguments
from lightning_gpp.capture.values.structure import flatten


@dataclass(frozen=True, slots=True)
class Block:
    """One sub-module call of a hand-made stage graph.

    Attributes:
        name: name of its result, for other blocks.
        module: qualified name of the sub-module.
        inputs: arguments of ``forward``, or names of earlier blocks; passed by position.
    """

    name: str
    module: str
    inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BlockGraph:
    """A forward written as calls of sub-modules, for models that cannot be traced.

    Attributes:
        blocks: the calls, each after those whose results it reads.
        outputs: what forward returns: a name, or a tuple, list or dict of names. A tuple of one
            name, ``("fuse",)``, is returned as the value itself.

    >>> graph = BlockGraph(
    ...     blocks=(Block("a", "encoders.a", ("x_a",)), Block("fuse", "fusion", ("a", "x_b"))),
    ...     outputs="fuse",
    ... )
    """

    blocks: tuple[Block, ...]
    outputs: Any


def trace_blocks(module: nn.Module, arguments: Arguments, blocks: BlockGraph) -> Trace:
    """Traces the forward that the user's blocks describe.

    Raises:
        CaptureError: a name is unknown or used twice.
    """
    graph, recorder = fx.Graph(), Recorder()
    inputs = [
        arguments.frozen[position] if name is None else recorder.mark(graph.placeholder(name))
        for position, name in enumerate(arguments.names)
    ]
    known: dict[str, Any] = arguments.structure.unflatten(inputs)
    submodules = dict(module.named_modules(remove_duplicate=False))
    for block in blocks.blocks:
        if block.module not in submodules:
            raise CaptureError(f"block {block.name!r} names an unknown module {block.module!r}")
        if block.name in known:
            raise CaptureError(f"block {block.name!r}: the name is taken; names must be unique")
        args = tuple(_look_up(known, name, f"block {block.name!r}") for name in block.inputs)
        node = graph.create_node("call_module", block.module, args, {}, name=block.name)
        known[block.name] = recorder.mark(node)
        node.meta["name"] = block.name
    names, structure = flatten(blocks.outputs)
    if isinstance(blocks.outputs, tuple) and len(blocks.outputs) == 1:
        structure = structure.children[0]
    graph.output(tuple(_look_up(known, name, "outputs") for name in names))
    return Trace(graph, structure)


def _look_up(known: Mapping[str, Any], name: str, reader: str) -> Any:
    if name not in known:
        raise CaptureError(
            f"{reader} of the given blocks reads {name!r}, which is neither an argument of forward "
            f"nor an earlier block; known are {sorted(known)}"
        )
    return known[name]
