"""Capture by running: the real forward once, on real tensors, with every call recorded.

A ``TorchFunctionMode`` sees the torch calls, a patched ``Module.__call__`` the leaf modules and
``Function.apply`` the custom autograd functions. Python around them just runs, so lists, dicts
and loops need no support; sizes are numbers that remember their node
(:mod:`lightning_gpp.capture.sizes`) and decisions become guards.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from lightning_gpp.capture.arguments import Arguments
from lightning_gpp.capture.errors import REMEDY, CaptureError, user_location
from lightning_gpp.capture.leaves import LeafPolicy
from lightning_gpp.capture.sizes import TracedFloat, TracedInt, is_traced
from lightning_gpp.capture.structure import Step, Structure, flatten
from lightning_gpp.capture.trace import (
    Names,
    Recorder,
    Trace,
    apply_function,
    assign_buffer,
    guard,
    rebuild,
)

_SIZES = frozenset({"size", "shape", "numel", "nelement", "__len__"})
# fmt: off
_METADATA = frozenset({
    "dim", "ndim", "ndimension", "dtype", "device", "layout", "itemsize", "element_size",
    "get_device", "is_leaf", "grad_fn", "names", "requires_grad", "is_floating_point",
    "is_complex", "is_signed", "is_contiguous", "stride", "storage_offset", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mps", "is_xpu", "is_mkldnn",
    "is_inference", "is_conj", "is_neg", "_version", "data_ptr", "output_nr", "untyped_storage",
    "is_same_size", "result_type", "__hash__", "__repr__", "__format__", "__str__", "__dir__",
})
# fmt: on
_DECISIONS = frozenset({"__bool__", "is_nonzero", "equal", "allclose", "__contains__"})
_REFUSED = frozenset({"backward", "grad", "__set__"})


def trace_concretely(
    module: nn.Module,
    arguments: Arguments,
    policy: LeafPolicy,
    tensors: Mapping[str, Tensor],
) -> Trace:
    """Traces ``module.forward`` on ``tensors`` in the mode the module is in.

    Raises:
        CaptureError: Python reads a value out of a tensor, or does something else that cannot be
            recorded; the message names the line.
    """
    return _Tracer(module, policy).trace(arguments, tensors)


class _Tracer(TorchFunctionMode):
    """Records calls; see the module's docstring."""

    def __init__(self, module: nn.Module, policy: LeafPolicy) -> None:
        super().__init__()
        self.module, self.policy = module, policy
        self.graph = fx.Graph()
        self.recorder = Recorder()
        self.names = Names.of(module)
        # id -> (the tensor, kept alive so that its id stays its own; its node or where to find it)
        self.known: dict[int, tuple[Tensor, _Origin]] = {}
        self.named: dict[str, fx.Node] = {}
        self.guarded: set[tuple[fx.Node, Any]] = set()

    def trace(self, arguments: Arguments, tensors: Mapping[str, Tensor]) -> Trace:
        """Runs the forward and returns what was recorded."""
        inputs = {}
        for name, tensor in tensors.items():
            node = self.recorder.mark(self.graph.placeholder(name))
            inputs[name] = tensor.detach().requires_grad_(tensor.requires_grad)
            if tensor.requires_grad:  # an in-place change of it must be as legal as the caller's
                inputs[name] = inputs[name].view_as(inputs[name])
            self._know(inputs[name], _Origin(node))
        args, kwargs = arguments.rebuild(inputs)
        with self._patches(), self:
            result = self.module.forward(*args, **kwargs)
            self._record_assigned_buffers()
        leaves, structure = flatten(result)
        self.graph.output(tuple(self._argument(leaf) for leaf in leaves))
        return Trace(self.graph, structure)

    # What is intercepted

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            name = func.__self__.__name__  # type: ignore[attr-defined]
            return self._torch_call(name, "call_function", getattr, (args[0], name), {})
        if getattr(torch.Tensor, name, None) is func:
            return self._torch_call(name, "call_method", name, args, kwargs)
        return self._torch_call(name, "call_function", func, args, kwargs)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Records a call outside of torch (arithmetic on sizes)."""
        return self._record("call_function", function, args, {})

    def guard(self, node: fx.Node, value: Any, *, on_data: bool) -> None:
        """Records that ``node`` must be ``value`` at run time too."""
        if (node, value) not in self.guarded:
            self.guarded.add((node, value))
            location = user_location()
            self._node("call_function", guard, (node, value, on_data, location), {})

    def _torch_call(
        self, name: str, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name in _METADATA:
            return _run(op, target, _plain(args), _plain(kwargs))
        if name in _REFUSED:
            raise CaptureError(f"{user_location()} uses {name!r} inside of forward: {REMEDY}")
        return self._record(op, target, args, kwargs, name)

    def _module_call(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        name = self.names.modules.get(id(module))
        if not self.policy.is_leaf(module, name or ""):
            with self.recorder.inside(self.recorder.scopes[-1] if name is None else name):
                return original(module, *args, **kwargs)
        if name is None:
            return self._record("call_function", module, args, kwargs)
        return self._record("call_module", name, args, kwargs, run=module)

    def _apply(self, original: Callable[..., Any], function: Any, args: tuple[Any, ...]) -> Any:
        if function is CheckpointFunction:
            return args[0](*args[2:])
        return self._record(
            "call_function",
            apply_function,
            (function, *args),
            {},
            run=lambda _, *rest: original(function, *rest),
        )

    @contextmanager
    def _patches(self) -> Iterator[None]:
        tracer = self
        call, apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]

        def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not _is_recording(tracer):
                return call(module, *args, **kwargs)
            return tracer._module_call(call, module, args, kwargs)

        def function_apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs or not _is_recording(tracer):
                return apply.__func__(function, *args, **kwargs)
            return tracer._apply(apply.__func__, function, args)

        nn.Module.__call__ = module_call  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(function_apply)  # type: ignore
        try:
            with self._patched_len():
                yield
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]
            torch.autograd.Function.apply = apply  # type: ignore[method-assign]

    @contextmanager
    def _patched_len(self) -> Iterator[None]:
        """Lets ``len(x)`` in forwards return a size: the built-in would make it a plain int."""

        def traced_len(value: Any) -> Any:
            is_tensor = isinstance(value, Tensor) and _is_recording(self)
            return value.shape[0] if is_tensor and value.dim() else builtins.len(value)

        namespaces = {
            id(space): space
            for module in self.module.modules()
            if (space := getattr(module.forward, "__globals__", {"__name__": "torch."}))
            and not space.get("__name__", "").startswith("torch.")
            and "len" not in space
        }
        for space in namespaces.values():
            space["len"] = traced_len
        try:
            yield
        finally:
            for space in namespaces.values():
                del space["len"]

    # What is recorded

    def _record(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        run: Callable[..., Any] | None = None,
    ) -> Any:
        node_args = tuple(self._argument(arg) for arg in args)
        node_kwargs = {key: self._argument(value) for key, value in kwargs.items()}
        is_constant = op != "call_module" and not _depends_on_data((node_args, node_kwargs))
        node = self._node(op, target, node_args, node_kwargs)
        with torch._C.DisableTorchFunction():
            random_state = torch.random.get_rng_state() if is_constant else None
            if run is not None:
                result = run(*_plain(args), **_plain(kwargs))
            else:
                result = _run(op, target, _plain(args), _plain(kwargs))
            if random_state is not None:
                is_constant = torch.equal(random_state, torch.random.get_rng_state())
        node.meta["is_constant"] = is_constant
        if not node.all_input_nodes and not _has_tensors(result) and op != "call_module":
            self.graph.erase_node(node)  # a setting (torch.no_grad), or a constant
            return result
        return self._traced(result, node, name)

    def _node(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        return self.recorder.mark(self.graph.create_node(op, target, args, kwargs))

    def _traced(self, result: Any, node: fx.Node, name: str | None) -> Any:
        """``result`` with its tensors known, and with sizes that remember ``node``."""
        if isinstance(result, torch.Size) and name in _SIZES:
            sizes: Any = [TracedInt(self, self._item(node, i), n) for i, n in enumerate(result)]
            return torch.Size(sizes)
        leaves, structure = flatten(result)
        traced = [
            self._traced_leaf(leaf, _Origin(node, path), name)
            for leaf, path in zip(leaves, structure.paths(), strict=True)
        ]
        return structure.unflatten(traced) if any(map(_is_changed, leaves, traced)) else result

    def _traced_leaf(self, leaf: Any, origin: _Origin, name: str | None) -> Any:
        if isinstance(leaf, Tensor):
            if id(leaf) in self.known or id(leaf) in self.names.tensors:
                with torch._C.DisableTorchFunction():
                    leaf = leaf.view_as(leaf)  # so that one object has one origin
            self._know(leaf, origin)
            return leaf
        if isinstance(leaf, bool) or not isinstance(leaf, int | float | complex | str):
            if name in _DECISIONS and not origin.node.meta["is_constant"]:
                self.guard(self._node_at(origin), leaf, on_data=True)
            elif isinstance(leaf, bool) and name is None:
                self.guard(self._node_at(origin), leaf, on_data=False)
            return leaf
        if origin.node.meta["is_constant"]:
            return leaf
        is_number = name in _SIZES or name is None or origin.path
        if is_number and isinstance(leaf, int):
            return TracedInt(self, self._node_at(origin), leaf)
        if is_number and isinstance(leaf, float):
            return TracedFloat(self, self._node_at(origin), leaf)
        raise CaptureError(
            f"{user_location()} reads a number out of a tensor ({name}), which would be frozen "
            f"into the graph: {REMEDY}"
        )

    def _record_assigned_buffers(self) -> None:
        """``self.buffer = value`` happens outside of torch; seen only by its result."""
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in self.names.tensors:
                    args = (module, name, self._argument(buffer))
                    self._node("call_function", assign_buffer, args, {})

    # Where tensors come from

    def _know(self, tensor: Tensor, origin: _Origin) -> None:
        self.known[id(tensor)] = (tensor, origin)

    def _argument(self, value: Any) -> Any:
        """``value`` with nodes in place of what was traced."""
        if is_traced(value):
            return value.fx_node
        if isinstance(value, Tensor):
            return self._tensor_argument(value)
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return slice(*(self._argument(part) for part in parts))
        if isinstance(value, torch.Size):
            return tuple(self._argument(item) for item in value)
        leaves, structure = flatten(value)
        if structure.container is None:
            return value
        nodes = [self._argument(leaf) for leaf in leaves]
        if not any(map(_is_changed, leaves, nodes)):
            return value
        if _is_plain(structure):
            return structure.unflatten(nodes)
        return self._node("call_function", rebuild, (structure, *nodes), {})

    def _tensor_argument(self, tensor: Tensor) -> Any:
        if id(tensor) in self.known:
            return self._node_at(self.known[id(tensor)][1])
        name = self.names.tensors.get(id(tensor))
        if name is not None:
            if name not in self.named:
                self.named[name] = self._node("get_attr", name, (), {})
            return self.named[name]
        with torch._C.DisableTorchFunction():
            is_computed = tensor.grad_fn is not None
        if is_computed:
            raise CaptureError(
                f"{user_location()} uses a tensor that was computed out of sight (by an extension "
                f"that hides its calls, or before this forward): {REMEDY}"
            )
        return tensor

    def _node_at(self, origin: _Origin) -> fx.Node:
        node = origin.node
        for step in origin.path:
            node = self._item(node, step.key, step.look_up)
        return node

    def _item(self, node: fx.Node, key: Any, look_up: Callable[..., Any] | None = None) -> fx.Node:
        look_up = look_up or Step("item", key).look_up
        cache = node.meta.setdefault("items", {})
        if key not in cache:
            item = self._node("call_function", look_up, (node, key), {})
            item.meta["is_constant"] = node.meta.get("is_constant", False)
            cache[key] = item
        found: fx.Node = cache[key]
        return found


class _Origin:
    """A node, and the steps from its value to the tensor."""

    __slots__ = ("node", "path")

    def __init__(self, node: fx.Node, path: tuple[Step, ...] = ()) -> None:
        self.node, self.path = node, path


def _is_recording(tracer: TorchFunctionMode) -> bool:
    return torch._C._is_torch_function_mode_enabled()


def _run(op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def _plain(value: Any) -> Any:
    """``value`` with plain numbers in place of traced ones."""
    if is_traced(value):
        return value.value
    if isinstance(value, slice):
        return slice(_plain(value.start), _plain(value.stop), _plain(value.step))
    if isinstance(value, torch.Size):
        return torch.Size([_plain(item) for item in value])
    leaves, structure = flatten(value)
    if structure.container is None:
        return value
    plain = [_plain(leaf) for leaf in leaves]
    return structure.unflatten(plain) if any(map(_is_changed, leaves, plain)) else value


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in flatten(value)[0])


def _is_changed(before: Any, after: Any) -> bool:
    return before is not after


def _is_plain(structure: Structure) -> bool:
    """Whether fx maps over the container by itself and keeps its type."""
    return structure.container in (None, list, tuple, dict) and all(
        map(_is_plain, structure.children)
    )


def _depends_on_data(value: Any) -> bool:
    nodes: list[fx.Node] = []
    fx.node.map_arg(value, nodes.append)
    return not all(node.meta.get("is_constant", False) for node in nodes)
