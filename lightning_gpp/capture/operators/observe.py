"""What a traced graph does when it runs: types of its values, and what it changes in place.

Nothing is derived from names or schemas: every node runs once, and version counters and storages
tell which tensors it changed and which share memory. Calls that a tracer runs are observed then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_gpp.capture.errors import GuardError
from lightning_gpp.capture.tracing.trace import Names, assign_buffer, context_of
from lightning_gpp.capture.values.structure import flatten, tensors_of


@dataclass(frozen=True, slots=True)
class Observation:
    """What one node did.

    Attributes:
        value: its result, if it is no tensor and contains none; else None.
        shapes: of the tensors in its result.
        dtypes: of the same.
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
    """Watches nodes while they run.

    Args:
        module: the captured module; its buffers change as its forward changes them.
        source: gives the parameter whose copy a tensor is or looks into, else the tensor.

    Attributes:
        module: likewise.
        observations: of the nodes that ran.
    """

    def __init__(
        self, module: nn.Module, source: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> None:
        self.observations: dict[fx.Node, Observation] = {}
        self.module, self._names, self._source = module, Names.of(module), source
        self._storages: dict[Any, int] = {}
        self._buffer_of = {self._storage(item): name for name, item in module.named_buffers()}
        self._values: dict[fx.Node, Any] = {}  # all kept: storage ids must stay unique

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
            self._values[node] = kept
        results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        written = [t for t, before in zip(operands, versions, strict=True) if t._version != before]
        changed_names = assigned_buffers(node, self._names)
        for name, tensor in owned.items():
            if self._is_changed(name, tensor, contents[name], written):
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

    def _is_changed(
        self, name: str, tensor: Tensor, content: Tensor, written: Sequence[Tensor]
    ) -> bool:
        now = _buffer(self.module, name)  # a leaf module may have replaced it
        if now is None or tensor.is_meta:  # there are no values to compare
            return now is not tensor or any(tensor is each for each in written)
        return not torch.equal(now, content)

    def _storage(self, tensor: Tensor) -> int:
        """A small id, equal exactly for tensors that share memory.

        A copy of a parameter on the device has the storage of the parameter.
        """
        tensor = self._source(tensor)
        is_plain = tensor.layout is torch.strided
        key = (is_plain, tensor.untyped_storage()._cdata if is_plain else id(tensor))
        return self._storages.setdefault(key, len(self._storages))

    def value(self, node: fx.Node) -> Any:
        """The value of a node that ran."""
        if node.op == "get_attr":
            return attrgetter(str(node.target))(self.module)
        return self._values[node]


def observe(
    graph: fx.Graph, tensors: Mapping[str, Tensor], observer: Observer
) -> dict[fx.Node, Observation]:
    """Runs the graph node by node.

    Args:
        graph: whose ``call_module`` and ``get_attr`` targets are found in the captured module.
        tensors: value per placeholder.
        observer: nodes that it has seen, on the same tensors, do not run again.

    Raises:
        GuardError: a decision comes out differently; ``name`` tells which.
    """
    nodes = [node for node in graph.nodes if node.op != "output"]
    for node in nodes:
        if node in observer.observations:
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), observer.value)
        try:
            observer.watch(
                node,
                args,
                kwargs,
                lambda *a, n=node, **k: run_node(n, observer.module, a, k, tensors),
            )
        except GuardError as error:
            error.name = node.name
            raise
    return {node: observer.observations[node] for node in nodes}


def run_node(
    node: fx.Node,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Mapping[str, Tensor],
) -> Any:
    """The result of one node."""
    with context_of(node):
        if node.op == "placeholder":
            return tensors[str(node.target)]
        if node.op == "get_attr":
            return attrgetter(str(node.target))(module)
        if node.op == "call_module":
            return module.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        return target(*args, **kwargs)


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
    found = (str(arg.target) for arg in node.all_input_nodes if arg.op == "get_attr")
    buffers = {name: _buffer(module, name) for name in found}
    return {name: buffer for name, buffer in buffers.items() if buffer is not None}


def _buffer(module: nn.Module, name: str) -> Tensor | None:
    """A buffer by qualified name; None for a parameter."""
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path)._buffers.get(attribute)
