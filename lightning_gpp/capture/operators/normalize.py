"""Brings traces into one shape, so that traces of two modes can be compared node by node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from lightning_gpp.capture.operators.observe import Observation
from lightning_gpp.capture.tracing.trace import Trace, assign_buffer, guard, identity
from lightning_gpp.capture.values.structure import LOOK_UPS


def protect_inputs(trace: Trace, observations: Mapping[fx.Node, Observation]) -> bool:
    """Copies the inputs that forward changes in place; returns whether there are any.

    Every stage gets its own copy of an input, so a change must become an ordinary value.
    """
    changed = frozenset().union(*(item.changed for item in observations.values()))
    found = False
    for node in list(trace.graph.nodes):
        if node.op == "placeholder" and observations[node].touched & changed:
            found = True
            with trace.graph.inserting_after(node):
                copy = trace.graph.call_function(torch.clone, (node,))
            copy.meta.update(node.meta)
            node.replace_all_uses_with(
                copy, delete_user_cb=lambda user, copy=copy: user is not copy
            )
    return found


def normalize(
    trace: Trace, observations: Mapping[fx.Node, Observation], *, dropped: str = ""
) -> Trace:
    """A copy without dead nodes, with metadata frozen and with canonical names.

    Devices and element types become constants: a stage replaces the device by its own.
    Observations are kept in ``node.meta["observation"]``.

    Args:
        trace: is left as it is.
        observations: of its nodes.
        dropped: name of a node without readers that counts as dead, too.
    """
    frozen = {
        node: item.value
        for node, item in observations.items()
        if isinstance(item.value, torch.device | torch.dtype | torch.layout)
    }
    live = _live_nodes(trace, observations, frozen, dropped)
    graph, copied = fx.Graph(), dict[fx.Node, Any](frozen)
    changed = frozenset().union(*(item.changed for item in observations.values()))
    numbers: dict[Any, fx.Node] = {}
    for node in trace.graph.nodes:
        if node in live and node not in frozen:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copied.__getitem__)
            number = _number_key(node, args, observations, changed)
            if number in numbers:
                copied[node] = numbers[number]
                continue
            name = _base_name(node, copied)
            copy = graph.create_node(node.op, node.target, args, kwargs, name=name)
            copy.meta.update(node.meta, observation=observations[node])
            copied[node] = copy
            if number is not None:
                numbers[number] = copy
    outputs = fx.node.map_arg(trace.outputs, copied.__getitem__)
    graph.output(tuple(_own_name(graph, leaf) for leaf in outputs))
    return Trace(graph, trace.output, trace.calls)


def without_guard(trace: Trace, name: str) -> Trace:
    """A copy of a normalized trace without one of its guards, and without what only that reads."""
    observations = {node: observation(node) for node in trace.graph.nodes if node.op != "output"}
    return normalize(trace, observations, dropped=name)


def observation(node: fx.Node) -> Observation:
    """What a normalized node did when it ran."""
    found: Observation = node.meta["observation"]
    return found


def _number_key(
    node: fx.Node,
    args: tuple[Any, ...],
    observations: Mapping[fx.Node, Observation],
    changed: frozenset[int],
) -> Any:
    """Equal for sizes, and arithmetic on them, that are the same; None for what is neither.

    Forwards ask for the same size again and again; each would travel between stages by itself.

    Args:
        node: in question.
        args: its positional arguments in the new graph.
        observations: of all nodes.
        changed: storages that nodes change in place.
    """
    if observations[node].has_tensors or node.target is guard or node.kwargs:
        return None
    is_size = node.target == "size" or (node.target is getattr and node.args[1] == "shape")
    is_arithmetic = node.op == "call_function" and not any(
        observations[arg].has_tensors for arg in node.all_input_nodes
    )
    if not is_arithmetic and (not is_size or observations[node].touched & changed):
        return None
    key = (node.target, *args)
    return key if all(isinstance(arg, fx.Node | int | float | str) for arg in args) else None


def _live_nodes(
    trace: Trace,
    observations: Mapping[fx.Node, Observation],
    frozen: Mapping[fx.Node, Any],
    dropped: str,
) -> set[fx.Node]:
    returned = trace.graph.output_node().all_input_nodes
    live: set[fx.Node] = set(returned)
    read_later = {storage for node in returned for storage in observations[node].touched}
    for node in reversed(trace.graph.nodes):
        if node.op == "output" or node.name == dropped:
            continue
        seen = observations[node]
        if node in live or node.op == "placeholder" or _has_effect(node, seen, read_later):
            live.add(node)
            if node not in frozen:
                live.update(node.all_input_nodes)
                read_later |= seen.touched
    return live


def _has_effect(node: fx.Node, seen: Observation, read_later: set[int]) -> bool:
    """Whether a node without readers must run: it decides, or changes what is read."""
    if node.target in (guard, assign_buffer, torch._assert, "register_hook"):
        return True
    return bool(seen.changed_buffers) or bool(seen.changed & read_later)


def _base_name(node: fx.Node, copied: Mapping[fx.Node, Any]) -> str:
    if "name" in node.meta:
        return str(node.meta["name"])
    if node.op == "placeholder":
        return str(node.target)
    if node.op in ("get_attr", "call_module"):
        return module_identifier(str(node.target))
    if node.target in LOOK_UPS and isinstance(node.args[0], fx.Node):
        producer, key = copied[node.args[0]], node.args[1]
        if isinstance(producer, fx.Node) and isinstance(key, int | str):
            return f"{producer.name}_{key}"
    return function_name(node).rpartition(".")[2].strip("_") or "call"


def module_identifier(name: str) -> str:
    """A qualified name as an identifier."""
    name = name.replace(".", "_") or "root"
    return name if name.isidentifier() else f"module_{name}"


def function_name(node: fx.Node) -> str:
    """Readable dotted name of what a node calls (``torch.cat``, ``Tensor.view``)."""
    if isinstance(node.target, str):
        return f"Tensor.{node.target}" if node.op == "call_method" else node.target
    target: Any = node.target
    if isinstance(target, nn.Module):
        return type(target).__name__
    name = getattr(target, "__name__", type(target).__name__)
    place = getattr(target, "__module__", None) or "torch"
    place = {"_operator": "operator", "torch._C._nn": "torch.nn.functional"}.get(place, place)
    return f"{place}.{name}"


def _own_name(graph: fx.Graph, leaf: Any) -> Any:
    """The output leaf; a parameter that forward returns becomes a value with its own name."""
    if not isinstance(leaf, fx.Node) or leaf.op != "get_attr":
        return leaf
    node = graph.create_node("call_function", identity, (leaf,), {}, name=f"{leaf.name}_value")
    node.meta.update(leaf.meta)
    return node
