"""Capture by running: the real forward once, on real tensors, with every call recorded.

A ``TorchFunctionMode`` sees the torch calls, a patched ``Module.__call__`` the leaf modules and
``Function.apply`` the custom autograd functions. Python around them just runs, so lists, dicts
and loops need no support; sizes are numbers that remember their node
(:mod:`lightning_gpp.capture.sizes`) and decisions become guards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from lightning_gpp.capture.arguments import Arguments
from lightning_gpp.capture.errors import REMEDY, CaptureError, user_location
from lightning_gpp.capture.keep_whole import KeepWholeError, no_seeding
from lightning_gpp.capture.leaves import LeafPolicy
from lightning_gpp.capture.library_switches import tracing_announced
from lightning_gpp.capture.nested_padding import clear_padding, clears_padding, without_fast_path
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
from lightning_gpp.capture.traced_names import traced_names
from lightning_gpp.capture.whole_functions import whole_functions
from lightning_gpp.capture.withheld import withhold

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
_CUTTERS = frozenset(
    {
        "chunk",
        "split",
        "split_with_sizes",
        "tensor_split",
        "unbind",
        "__iter__",
        "tolist",
        "unsafe_chunk",
        "unsafe_split",
        "hsplit",
        "vsplit",
        "dsplit",
    }
)
"""Calls whose result Python may take apart into as many pieces as there happen to be."""


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
        # id of a module -> what to do with its first argument before it is called
        self.before: dict[int, Callable[[Tensor], Tensor]] = {}

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
        with self._patches(), tracing_announced(), self:
            result = self.module.forward(*args, **kwargs)
            self.recorder.draws.check("")
            self._record_assigned_buffers()
        leaves, structure = flatten(withhold(result))
        self.graph.output(tuple(self._argument(leaf) for leaf in leaves))
        return Trace(self.graph, structure, self.recorder.all_calls)

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

    def guard(self, node: fx.Node, value: Any) -> None:
        """Records that ``node`` must be ``value`` at run time too.

        Raises:
            KeepWholeError: it depends on nothing but random numbers.
        """
        if (node, value) not in self.guarded:
            self.guarded.add((node, value))
            location, on_data = user_location(), not is_of_sizes(node)
            if on_data and not _placeholders_of(node):
                raise KeepWholeError(
                    f"{location} decides by a random number: {REMEDY}", self.recorder.scope
                )
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
        if id(module) in self.before:
            args = (self.before[id(module)](args[0]), *args[1:])
        is_foreign = name is None and next(module.parameters(), None) is not None
        if is_foreign and self.policy.is_leaf(module, ""):
            raise CaptureError(
                f"{user_location()} calls a {type(module).__name__} that is no registered "
                "sub-module, so its parameters would not be trained: keep it in an nn.ModuleList, "
                "an nn.ModuleDict or an attribute"
            )
        if name is not None and self.policy.is_leaf(module, name):
            self.recorder.draws.check(self.recorder.scope)
            with self.recorder.draws.allowed():
                return self._record("call_module", name, args, kwargs, run=module)
        padding = clears_padding(module, args, kwargs)
        with self.recorder.inside(self.recorder.scope if name is None else name):
            if padding is None:
                return original(module, *args, **kwargs)
            return self._encode(original, module, padding, args, kwargs)

    def _encode(
        self, original: Callable[..., Any], encoder: Any, padding: Tensor, args: Any, kwargs: Any
    ) -> Any:
        """Calls a transformer encoder; see :mod:`lightning_gpp.capture.nested_padding`."""
        training = encoder.layers[0].training

        def clear(output: Tensor) -> Tensor:
            cleared: Tensor = self.call(clear_padding, output, padding, training)
            return cleared

        if encoder.norm is None:
            return clear(original(encoder, *args, **kwargs))
        self.before[id(encoder.norm)] = clear
        try:
            return original(encoder, *args, **kwargs)
        finally:
            del self.before[id(encoder.norm)]

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

    def _whole(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A library function that becomes one node."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not _is_recording(self):
                return function(*args, **kwargs)
            return self._record("call_function", function, args, kwargs)

        return call

    @contextmanager
    def _patches(self) -> Iterator[None]:
        tracer = self
        call, apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
        script_call = torch._C.ScriptFunction.__call__

        def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not _is_recording(tracer):
                return call(module, *args, **kwargs)
            return tracer._module_call(call, module, args, kwargs)

        def function_apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs or not _is_recording(tracer):
                return apply.__func__(function, *args, **kwargs)
            return tracer._apply(apply.__func__, function, args)

        def scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
            if not _is_recording(tracer):
                return script_call(function, *args, **kwargs)
            return tracer._record("call_function", function, args, kwargs)

        nn.Module.__call__ = module_call  # type: ignore[method-assign]
        torch._C.ScriptFunction.__call__ = scripted  # type: ignore
        torch.autograd.Function.apply = classmethod(function_apply)  # type: ignore
        try:
            with ExitStack() as stack:
                stack.enter_context(traced_names(self.module, self, lambda: _is_recording(self)))
                stack.enter_context(whole_functions(self.module, self._whole))
                stack.enter_context(no_seeding(lambda: _is_recording(self)))
                stack.enter_context(without_fast_path())
                yield
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]
            torch._C.ScriptFunction.__call__ = script_call  # type: ignore[method-assign]
            torch.autograd.Function.apply = apply  # type: ignore[method-assign]

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
        node.meta["of_sizes"] = (
            name in _SIZES
            or name in _CUTTERS - {"tolist"}
            or (
                name is None
                and op == "call_function"
                and all(map(is_of_sizes, node.all_input_nodes))
            )
        )
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
        if name in _CUTTERS and not node.meta["is_constant"]:
            self.guard(self._item(node, None, _length), _length(result))
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
            is_decision = name in _DECISIONS and not origin.node.meta["is_constant"]
            if is_decision or (isinstance(leaf, bool) and name is None):
                self.guard(self._node_at(origin), leaf)
            return leaf
        if origin.node.meta["is_constant"]:
            return leaf
        is_number = name in _SIZES or name is None or origin.path
        if is_number and isinstance(leaf, int):
            return TracedInt(self, self._node_at(origin), leaf)
        if is_number and isinstance(leaf, float):
            return TracedFloat(self, self._node_at(origin), leaf)
        raise KeepWholeError(
            f"{user_location()} reads a number out of a tensor ({name}), which would be frozen "
            f"into the graph: {REMEDY}",
            self.recorder.scope,
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
        if isinstance(value, torch.Generator):
            raise CaptureError(
                f"{user_location()} draws from a torch.Generator of its own, whose state stages on "
                "different devices cannot share: draw from the default generator (no generator "
                f"argument), or {REMEDY}"
            )
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
            item.meta["of_sizes"] = look_up is _length or is_of_sizes(node)
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


def _length(pieces: Any, _: None = None) -> int:
    """Node function: number of pieces of what was cut; -1 for a number."""
    return len(pieces) if hasattr(pieces, "__len__") else -1


def is_of_sizes(node: fx.Node) -> bool:
    """Whether a number depends on sizes only, and not on the values in tensors."""
    return bool(node.meta.get("of_sizes", False))


def _placeholders_of(node: fx.Node) -> set[fx.Node]:
    """The inputs of the graph that a node depends on."""
    seen, stack = {node}, [node]
    while stack:
        fresh = set(stack.pop().all_input_nodes) - seen
        seen |= fresh
        stack += fresh
    return {item for item in seen if item.op == "placeholder"}


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
