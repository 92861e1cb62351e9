"""Records the graph of a traced forward, and which node every value comes from.

The tracer (:mod:`lightning_gpp.capture.tracing.concrete_tracer`) says what is called; here every
call runs once on the real values and becomes a node. Tensors are known by their identity, numbers
remember their node (:mod:`lightning_gpp.capture.tracing.sizes`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from lightning_gpp.capture.checks.rollback import random_state
from lightning_gpp.capture.errors import REMEDY, CaptureError, user_location
from lightning_gpp.capture.operators.observe import Observer
from lightning_gpp.capture.tracing.keep_whole import (
    KeepWholeError,
    LeafPolicy,
    is_of_library,
    only_raises,
)
from lightning_gpp.capture.tracing.sizes import TracedFloat, TracedInt, is_traced
from lightning_gpp.capture.tracing.trace import (
    SELECTORS,
    SIZES,
    Recorder,
    Trace,
    assign_buffer,
    closure,
    guard,
    rebuild,
    run_call,
)
from lightning_gpp.capture.values.placed import original
from lightning_gpp.capture.values.structure import (
    Step,
    Structure,
    flatten,
    leaves_of,
    map_leaves,
)

_DECISIONS = frozenset({"__bool__", "is_nonzero", "equal", "allclose", "__contains__"})
_READS = frozenset({"item", "tolist"})
_PIECES = frozenset(
    {"chunk", "split", "split_with_sizes", "tensor_split", "unbind", "__iter__"}
    | {"unsafe_chunk", "unsafe_split", "hsplit", "vsplit", "dsplit"}
)
"""Calls whose result Python may take apart into as many pieces as there happen to be."""
_SELECTORS = SELECTORS | {"bincount", "repeat_interleave"}

_ARRAYS = frozenset({"numpy", "__array__", "__dlpack__"})
"""Calls whose result computes out of sight."""


class Recording:
    """The nodes recorded so far, and the values that they stand for.

    Args:
        observer: watches the calls of a module's forward.

    Attributes:
        graph: what was recorded so far.
        recorder: marks nodes with where they come from.
        names: of the module's parts, parameters and buffers.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer, self._device = observer, torch.device("cpu")
        self.graph, self.recorder, self.names = fx.Graph(), Recorder(), observer.names
        # id -> (the tensor, kept alive so that its id stays its own; its node or where to find it)
        self._known: dict[int, tuple[Tensor, Origin]] = {}
        self._named: dict[str, fx.Node] = {}
        self._guarded: set[tuple[fx.Node, Any]] = set()
        self._raised: KeepWholeError | None = None

    def add_input(self, name: str, tensor: Tensor) -> None:
        """A tensor that the forward takes."""
        node = self.recorder.mark(self.graph.placeholder(name))
        self._device = tensor.device
        self.know(self._observer.watch(node, (), {}, lambda: tensor), Origin(node))

    def finish(self, result: Any) -> Trace:
        """The trace, once the forward has returned ``result``.

        Raises:
            KeepWholeError: a call raised, which it caught.
        """
        if self._raised is not None:
            raise self._raised
        leaves, structure = flatten(result)
        self.graph.output(tuple(self.argument(leaf) for leaf in leaves))
        return Trace(self.graph, structure, tuple(self.recorder.entered))

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Records a call outside of torch (arithmetic on sizes)."""
        return self.record("call_function", function, args, kwargs)

    def guard(self, node: fx.Node, value: Any) -> None:
        """Records that ``node`` must be ``value`` at run time too.

        Raises:
            KeepWholeError: not only sizes decide it, and it decides about more than an error.
        """
        if (node, value) not in self._guarded:
            self._guarded.add((node, value))
            location, on_data = user_location(), not node.meta["of_sizes"]
            if on_data and not only_raises(location):
                raise self._decides(node)
            seen = (node, value, on_data, location, self.recorder.scope)
            self._node("call_function", guard, seen, {})

    def _catches(self, node: fx.Node, error: Exception) -> KeepWholeError:
        what = f"{node.meta['location']} raises {type(error).__name__}, which forward catches"
        return KeepWholeError(f"{what}: {REMEDY}", self.recorder.scope, on_data=True)

    def _decides(self, node: fx.Node, what: str = "decides by {}") -> KeepWholeError:
        kinds = {read.op for read in closure([node], lambda each: each.all_input_nodes)}
        on_data, location = "placeholder" in kinds, user_location()
        by_weights = bool(kinds & {"get_attr", "call_module"})
        by = "what is in the data" if on_data else "weights" if by_weights else "a random number"
        text = f"{location} {what.format(by)}: {REMEDY}"
        return KeepWholeError(text, self.recorder.scope, on_data=on_data)

    def check_shown(self, tensor: Tensor) -> None:
        """Checks that no text is made of data, by which something may be chosen.

        Raises:
            KeepWholeError: it is.
        """
        node = self.argument(tensor)
        if _depends_on_data(node):
            raise self._decides(node, "prints {}, or makes a text of it that may choose something")

    def record(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        run: Callable[..., Any] | None = None,
    ) -> Any:
        """Runs a call and records it as a node.

        Args:
            op: kind of the node, as fx has it.
            target: what is called.
            args: of the call; traced values become nodes.
            kwargs: likewise.
            name: of a call of torch, which decides what its numbers are.
            run: what runs instead of the target.

        Returns:
            The result, with tensors that are known and numbers that remember their node.
        """
        node_args = tuple(map(self.argument, args))
        node_kwargs = {key: self.argument(value) for key, value in kwargs.items()}
        is_constant = op != "call_module" and not _depends_on_data((node_args, node_kwargs))
        node = self._node(op, target, node_args, node_kwargs)
        with torch._C.DisableTorchFunction():
            before = random_state(self._device)
            if run is None:  # a module may be false
                run = functools.partial(run_call, op, target)
            try:
                result = self._observer.watch(node, _plain(args), _plain(kwargs), run)
            except Exception as error:  # which the user's code may catch, to go on otherwise
                self._raised = self._raised or self._catches(node, error)
                raise
            draws = not torch.equal(before, random_state(self._device))
        selected = _selects(name, args) or any(arg.meta["selected"] for arg in node.all_input_nodes)
        is_arithmetic = name is None and op == "call_function"
        of_sizes = is_arithmetic and all(arg.meta["of_sizes"] for arg in node.all_input_nodes)
        of_sizes = of_sizes or name in SIZES or name in _PIECES
        is_constant, of_sizes = is_constant and not draws, of_sizes and not selected
        node.meta.update(is_constant=is_constant, selected=selected, of_sizes=of_sizes, draws=draws)
        has_tensors = any(isinstance(leaf, Tensor) for leaf in leaves_of(result))
        if not node.all_input_nodes and not has_tensors and op != "call_module":
            self.graph.erase_node(node)  # a setting (torch.no_grad), or a constant
            return result
        return self._traced(result, node, name)

    def _node(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        return self.recorder.mark(self.graph.create_node(op, target, args, kwargs))

    def _traced(self, result: Any, node: fx.Node, name: str | None) -> Any:
        """``result`` with its tensors known, and with sizes that remember ``node``."""
        if isinstance(result, torch.Size) and name in SIZES:
            sizes: Any = [TracedInt(self, self._item(node, i), n) for i, n in enumerate(result)]
            return torch.Size(sizes)
        if (name in _PIECES or name == "tolist") and not node.meta["is_constant"]:
            self.guard(self._item(node, None, _length), _length(result))
        leaves, structure = flatten(result)
        traced = [
            self._traced_leaf(leaf, Origin(node, path), name)
            for leaf, path in zip(leaves, structure.paths(), strict=True)
        ]
        return structure.unflatten(traced) if any(map(operator.is_not, leaves, traced)) else result

    def _traced_leaf(self, leaf: Any, origin: Origin, name: str | None) -> Any:
        if isinstance(leaf, Tensor):
            if id(leaf) in self._known or id(leaf) in self.names.tensors:
                with torch._C.DisableTorchFunction():
                    leaf = leaf.view_as(leaf)  # so that one object has one origin
            self.know(leaf, origin)
            return leaf
        is_data = not origin.node.meta["is_constant"]
        if isinstance(leaf, bool) or not isinstance(leaf, int | float | complex | str):
            is_read = name is None or (name in _READS and is_data)
            if (name in _DECISIONS and is_data) or (isinstance(leaf, bool) and is_read):
                self.guard(self._node_at(origin), leaf)
            if name in _ARRAYS and is_data:
                raise self._frozen(origin.node, name)
            return leaf
        if not is_data:
            return leaf
        is_number = name is None or name in SIZES | _READS or origin.path
        kind = TracedInt if isinstance(leaf, int) else TracedFloat
        if is_number and isinstance(leaf, int | float):
            return kind(self, self._node_at(origin), leaf)
        raise self._frozen(origin.node, name)

    def _frozen(self, node: fx.Node, name: str | None) -> KeepWholeError:
        what = f"reads a number out of a tensor ({name}), which would be frozen into the graph"
        error = self._decides(node, what)
        error.on_data &= not is_of_library(user_location())
        return error

    def know(self, tensor: Tensor, origin: Origin) -> None:
        """Notes where a tensor comes from."""
        self._known[id(tensor)] = (tensor, origin)

    def argument(self, value: Any) -> Any:
        """``value`` with nodes in place of what was traced."""
        if is_traced(value):
            return value.fx_node
        if isinstance(value, Tensor):
            return self._tensor_argument(value)
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return slice(*(self.argument(part) for part in parts))
        if isinstance(value, torch.Size):
            return tuple(self.argument(item) for item in value)
        if isinstance(value, torch.Generator):
            raise CaptureError(
                f"{user_location()} draws from its own torch.Generator, whose state stages on "
                "different devices cannot share. Use the default generator (no generator "
                f"argument), or {REMEDY}"
            )
        leaves, structure = flatten(value)
        if structure.container is None:
            return value
        nodes = [self.argument(leaf) for leaf in leaves]
        if not any(map(operator.is_not, leaves, nodes)):
            return value
        if _is_plain(structure):
            return structure.unflatten(nodes)
        return self._node("call_function", rebuild, (structure, *nodes), {})

    def _tensor_argument(self, tensor: Tensor) -> Any:
        if id(tensor) in self._known:
            return self._node_at(self._known[id(tensor)][1])
        name = self.names.tensors.get(id(original(tensor)))
        if name is not None:
            if name not in self._named:
                self._named[name] = self._node("get_attr", name, (), {})
            return self._named[name]
        with torch._C.DisableTorchFunction():
            is_computed = tensor.grad_fn is not None
        if is_computed:
            raise CaptureError(
                f"{user_location()} uses a tensor whose computation was not recorded, because it "
                "was made before this forward or by an extension that hides its calls: "
                f"{REMEDY}"
            )
        return tensor

    def assigned_buffers(self, module: nn.Module, policy: LeafPolicy) -> None:
        """``self.buffer = value`` happens outside of torch; seen only by its result."""
        parts = dict(module.named_modules())
        leaves = tuple(f"{path}." for path, part in parts.items() if policy.is_leaf(part, path))
        for path, part in parts.items():
            for name, buffer in part._buffers.items():
                is_known = buffer is None or id(buffer) in self.names.tensors
                if not is_known and not f"{path}.".startswith(leaves):  # which do so themselves
                    args = (part, name, self.argument(buffer))
                    self._node("call_function", assign_buffer, args, {})

    def _node_at(self, origin: Origin) -> fx.Node:
        node = origin.node
        for step in origin.path:
            node = self._item(node, step.key, step.look_up)
        return node

    def _item(
        self, node: fx.Node, key: Any, look_up: Callable[..., Any] = operator.getitem
    ) -> fx.Node:
        items: dict[Any, fx.Node] = node.meta.setdefault("items", {})
        if key not in items:
            selected, of_sizes = node.meta["selected"], node.meta["of_sizes"]
            items[key] = self._node("call_function", look_up, (node, key), {})
            items[key].meta.update(
                is_constant=node.meta["is_constant"],
                selected=selected,
                of_sizes=of_sizes or (look_up is _length and not selected),
            )
        return items[key]


class Origin(NamedTuple):
    """The node that a tensor comes from, and the path inside of the node's value."""

    node: fx.Node
    path: tuple[Step, ...] = ()


def run_plain(op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a call on the values that the traced ones stand for."""
    return run_call(op, target, *_plain(args), **_plain(kwargs))


def _plain(value: Any) -> Any:
    """``value`` with plain numbers in place of traced ones."""
    return map_leaves(value, _plain_leaf)


def _plain_leaf(leaf: Any) -> Any:
    if isinstance(leaf, slice):
        return slice(*map(_plain_leaf, (leaf.start, leaf.stop, leaf.step)))
    return leaf.value if is_traced(leaf) else leaf


def _length(pieces: Any, _: None = None) -> int:
    """Node function: number of pieces of what was cut; -1 for a number."""
    return len(pieces) if hasattr(pieces, "__len__") else -1


def _selects(name: str | None, args: tuple[Any, ...]) -> bool:
    """Whether a call of torch returns as much as the data say."""
    if name in _SELECTORS or (name == "where" and len(args) == 1):
        return True
    indices = flatten(args[1:])[0] if name == "__getitem__" else []
    return any(isinstance(item, Tensor) and item.dtype is torch.bool for item in indices)


def _is_plain(structure: Structure) -> bool:
    """Whether fx maps over the container by itself and keeps its type."""
    return structure.container in (None, list, tuple, dict) and all(
        map(_is_plain, structure.children)
    )


def _depends_on_data(value: Any) -> bool:
    nodes: list[fx.Node] = []
    fx.node.map_arg(value, nodes.append)
    return not all(node.meta["is_constant"] for node in nodes)
