"""Observes a traced graph while it runs: types of its values, and changes in place.

Nothing is derived from names or schemas: every node runs once, and version counters and storages
tell which tensors it changed and which share memory. Calls that a tracer runs are observed then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_gpp.capture.tracing.keep_whole import WholeMethod
from lightning_gpp.capture.tracing.trace import (
    Names,
    Trace,
    assign_buffer,
    context_of,
    guard,
    identity,
    run_call,
)
from lightning_gpp.capture.values.placed import source
from lightning_gpp.capture.values.structure import LOOK_UPS, flatten, tensors_of
from lightning_gpp.common.tensor_places import memory_of


@dataclass(frozen=True, slots=True)
class Observation:
    """What one node did.

    Attributes:
        value: its result, if it is no tensor and contains none; else None.
        shapes: shapes of the tensors in its result.
        dtypes: their types.
        is_tensor: whether the result is a tensor itself, and not a container.
        requires_grad: whether one of them carries a gradient.
        touched: ids of the storages that it read or returned.
        changed: ids of the storages that it changed in place.
        changed_buffers: canonical names of the buffers that it changed.
    """

    value: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    is_tensor: bool
    requires_grad: bool
    touched: frozenset[int]
    changed: frozenset[int]
    changed_buffers: frozenset[str] = frozenset()

    @property
    def has_tensors(self) -> bool:
        """Whether the result contains a tensor."""
        return bool(self.shapes)


class Observer:
    """Observes nodes while they run.

    Args:
        module: the captured module; its buffers change as its forward changes them.

    Attributes:
        module: likewise.
        names: of its parts, parameters and buffers.
        observations: of the nodes that ran, by node.
        values: likewise.
    """

    def __init__(self, module: nn.Module) -> None:
        self.observations: dict[fx.Node, Observation] = {}
        self.module, self.names = module, Names.of(module)
        self._storages: dict[Any, int] = {}
        self._buffer_of = {self._storage(item): name for name, item in module.named_buffers()}
        self.values: dict[fx.Node, Any] = {}  # all kept: storage ids must stay unique

    def watch(
        self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]
    ) -> Any:
        """``run(*args, **kwargs)``, which is what ``node`` does."""
        owned = _owned_tensors(node, self.module)
        operands = [*tensors_of((args, kwargs)), *owned.values()]
        versions = [tensor._version for tensor in operands]
        contents = {name: tensor.clone() for name, tensor in owned.items()}
        value = run(*args, **kwargs)
        leaves, structure = flatten(value)
        # whoever called may change the container
        kept = value if structure.container is None else structure.unflatten(leaves)
        if node.op != "get_attr":  # a parameter, which does not stay on the device
            self.values[node] = kept
        results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        written = [t for t, before in zip(operands, versions, strict=True) if t._version != before]
        changed_names = assigned_buffers(node, self.names)
        for name, tensor in owned.items():
            now = _buffer(self.module, name)  # a leaf module may have replaced it
            if now is None or tensor.is_meta:  # there are no values to compare
                is_changed = now is not tensor or any(tensor is each for each in written)
            else:
                is_changed = not torch.equal(now, contents[name])
            if is_changed:
                changed_names |= {name}
                written.append(tensor)
        changed = frozenset(map(self._storage, written))
        self.observations[node] = Observation(
            value=None if results else kept,
            shapes=tuple(tuple(item.shape) for item in results),
            dtypes=tuple(item.dtype for item in results),
            is_tensor=isinstance(value, Tensor),
            requires_grad=any(item.requires_grad for item in results),
            touched=frozenset(map(self._storage, [*operands, *results])),
            changed=changed,
            changed_buffers=changed_names.union(
                self._buffer_of[item] for item in changed & self._buffer_of.keys()
            ),
        )
        return value

    def _storage(self, tensor: Tensor) -> int:
        """A small id, equal exactly for tensors that share memory.

        A copy of a parameter on the device has the storage of the parameter.
        """
        return self._storages.setdefault(memory_of(source(tensor)), len(self._storages))

    def value(self, node: fx.Node) -> Any:
        """The value of a node that ran."""
        if node.op == "get_attr":
            return attrgetter(str(node.target))(self.module)
        return self.values[node]

    def output(self, trace: Trace) -> Any:
        """The result of a trace whose nodes have run."""
        leaves = trace.outputs
        return trace.output.unflatten(
            [self.value(leaf) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        )


def observe(
    graph: fx.Graph, tensors: Mapping[str, Tensor], observer: Observer
) -> dict[fx.Node, Observation]:
    """Runs the graph node by node.

    Args:
        graph: whose ``call_module`` and ``get_attr`` targets are found in the captured module.
        tensors: value per placeholder.
        observer: nodes that it has seen, on the same tensors, do not run again.

    Raises:
        GuardError: a decision comes out differently.
    """
    nodes = [node for node in graph.nodes if node.op != "output"]
    for node in nodes:
        if node in observer.observations:
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), observer.value)
        run = partial(run_node, node, observer.module, tensors)
        observer.watch(node, args, kwargs, run)
    return {node: observer.observations[node] for node in nodes}


def run_node(
    node: fx.Node,
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The result of one node."""
    with context_of(node):
        if node.op == "placeholder":
            return tensors[str(node.target)]
        if node.op == "get_attr":
            return attrgetter(str(node.target))(module)
        if node.op == "call_module":
            return module.get_submodule(str(node.target))(*args, **kwargs)
        return run_call(node.op, node.target, *args, **kwargs)


def assigned_buffers(node: fx.Node, names: Names) -> frozenset[str]:
    """Qualified names of the buffers that a node replaces."""
    if node.target is not assign_buffer:
        return frozenset()
    owner = names.modules[id(node.args[0])]
    return frozenset({f"{owner}.{node.args[1]}".lstrip(".")})


def _owned_tensors(node: fx.Node, module: nn.Module) -> dict[str, Tensor]:
    """The buffers that a node may change beside its operands."""
    if node.op == "call_module":
        target = str(node.target)
        return dict(module.get_submodule(target).named_buffers(prefix=target))
    if isinstance(node.target, WholeMethod):
        return dict(node.target.layer.named_buffers(prefix=node.meta["layer"].name))
    found = (str(arg.target) for arg in node.all_input_nodes if arg.op == "get_attr")
    buffers = {name: _buffer(module, name) for name in found}
    return {name: buffer for name, buffer in buffers.items() if buffer is not None}


def _buffer(module: nn.Module, name: str) -> Tensor | None:
    """A buffer by qualified name; None for a parameter."""
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path)._buffers.get(attribute)


# Traces in one shape, so that those of two modes can be compared node by node ------------------


def protect_inputs(trace: Trace, observations: Mapping[fx.Node, Observation]) -> bool:
    """Copies the inputs that forward changes in place; returns whether there are any.

    Every stage gets its own copy of an input, so a change must become an ordinary value.
    """
    changed = frozenset().union(*(item.changed for item in observations.values()))
    inputs = [node for node in trace.graph.nodes if node.op == "placeholder"]
    written = [node for node in inputs if observations[node].touched & changed]
    for node in written:
        with trace.graph.inserting_after(node):
            copy = trace.graph.call_function(torch.clone, (node,))
        copy.meta.update(node.meta)
        node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
    return bool(written)


def normalize(trace: Trace, observations: Mapping[fx.Node, Observation]) -> Trace:
    """A copy without dead nodes, with metadata frozen and with canonical names.

    Devices and element types become constants: a stage replaces the device by its own.
    Observations are kept in ``node.meta["observation"]``.

    Args:
        trace: is left as it is.
        observations: of its nodes.
    """
    frozen = {
        node: item.value
        for node, item in observations.items()
        if isinstance(item.value, torch.device | torch.dtype | torch.layout)
    }
    live = _live_nodes(trace, observations, frozen)
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
    outputs = []
    for leaf in fx.node.map_arg(trace.outputs, copied.__getitem__):
        if isinstance(leaf, fx.Node) and leaf.op == "get_attr":  # a value with a name of its own
            name, meta = f"{leaf.name}_value", leaf.meta
            leaf = graph.create_node("call_function", identity, (leaf,), {}, name=name)
            leaf.meta.update(meta)
        outputs.append(leaf)
    graph.output(tuple(outputs))
    return Trace(graph, trace.output, trace.calls)


def observation(node: fx.Node) -> Observation:
    """The observation of a normalized node."""
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
    reads_tensors = any(observations[arg].has_tensors for arg in node.all_input_nodes)
    is_arithmetic = node.op == "call_function" and not reads_tensors
    if not is_arithmetic and (not is_size or observations[node].touched & changed):
        return None
    key = (node.target, *args)
    return key if all(isinstance(arg, fx.Node | int | float | str) for arg in args) else None


def _live_nodes(
    trace: Trace,
    observations: Mapping[fx.Node, Observation],
    frozen: Mapping[fx.Node, Any],
) -> set[fx.Node]:
    returned = trace.graph.output_node().all_input_nodes
    live: set[fx.Node] = set(returned)
    read_later = {storage for node in returned for storage in observations[node].touched}
    for node in reversed(trace.graph.nodes):
        if node.op == "output":
            continue
        seen = observations[node]
        has_effect = node.target in (guard, assign_buffer, torch._assert, "register_hook")
        has_effect = has_effect or bool(seen.changed_buffers or seen.changed & read_later)
        if node in live or node.op == "placeholder" or has_effect:
            live.add(node)
            if node not in frozen:
                live.update(node.all_input_nodes)
                read_later |= seen.touched
    return live


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
