"""Capture by running: the real forward once, on real tensors, with every call recorded.

A ``TorchFunctionMode`` sees the torch calls, a patched ``Module.__call__`` the leaf modules and
``Function.apply`` the custom autograd functions. Python around them just runs, so lists, dicts
and loops need no support; sizes are numbers that remember their node
(:mod:`lightning_gpp.capture.tracing.sizes`) and decisions become guards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from lightning_gpp.capture.errors import REMEDY, CaptureError, user_location
from lightning_gpp.capture.operators.observe import Observer
from lightning_gpp.capture.tracing.keep_whole import KeepWholeError
from lightning_gpp.capture.tracing.leaves import LeafPolicy
from lightning_gpp.capture.tracing.nested_padding import clear_padding, clears_padding
from lightning_gpp.capture.tracing.recording import Recording, run_plain
from lightning_gpp.capture.tracing.switches import switched
from lightning_gpp.capture.tracing.trace import Trace, apply_function
from lightning_gpp.capture.tracing.traced_names import traced_names
from lightning_gpp.capture.tracing.whole_functions import whole_functions
from lightning_gpp.capture.values.adjacency import in_edges
from lightning_gpp.capture.values.arguments import Arguments
from lightning_gpp.capture.values.withheld import withhold
from lightning_gpp.common.instance_attribute import replaced

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
_REFUSED = frozenset({"backward", "grad", "__set__"})


def trace_concretely(
    module: nn.Module,
    arguments: Arguments,
    policy: LeafPolicy,
    tensors: Mapping[str, Tensor],
    *,
    observer: Observer | None = None,
    whole_methods: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> Trace:
    """Traces ``module.forward`` on ``tensors`` in the mode the module is in.

    Args:
        module: whose forward is traced.
        arguments: of it.
        policy: which sub-modules stay whole.
        tensors: its inputs.
        observer: watches the calls of the forward.
        whole_methods: methods of the module that stay one node each, and what such a node calls.

    Raises:
        CaptureError: Python reads a value out of a tensor, or does something else that cannot be
            recorded; the message names the line.
    """
    observer = observer or Observer(module)
    return _CallTracer(module, policy, whole_methods, observer).trace(arguments, tensors)


class _CallTracer(TorchFunctionMode):
    """Records calls; see the module's docstring."""

    def __init__(
        self,
        module: nn.Module,
        policy: LeafPolicy,
        whole_methods: Mapping[str, Callable[..., Any]],
        observer: Observer,
    ) -> None:
        super().__init__()
        self.module, self.policy, self.whole_methods = module, policy, whole_methods
        self.recording = Recording(module, observer)
        # id of a module -> what to do with its first argument before it is called
        self.before: dict[int, Callable[[Tensor], Tensor]] = {}

    def trace(self, arguments: Arguments, tensors: Mapping[str, Tensor]) -> Trace:
        """Runs the forward and returns what was recorded."""
        inputs = {}
        for name, tensor in tensors.items():
            inputs[name] = tensor.detach().requires_grad_(tensor.requires_grad)
            if tensor.requires_grad:  # an in-place change of it must be as legal as the caller's
                inputs[name] = inputs[name].view_as(inputs[name])
            self.recording.add_input(name, inputs[name])
        args, kwargs = arguments.rebuild(inputs)
        drawing = self.recording.recorder.draws.checked("")
        with self._patches(), switched(is_recording), self, drawing:
            result = self.module.forward(*args, **kwargs)
            self.recording.assigned_buffers(self.module)
        return self.recording.finish(withhold(result))

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

    def _torch_call(
        self, name: str, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name in _METADATA:
            return run_plain(op, target, args, kwargs)
        if name in _REFUSED:
            raise KeepWholeError(
                f"{user_location()} uses {name!r} inside of forward: {REMEDY}",
                self.recording.recorder.scope,
            )
        return self.recording.record(op, target, args, kwargs, name)

    def _module_call(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        name = self.recording.names.modules.get(id(module))
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
            self.recording.recorder.draws.check(self.recording.recorder.scope)
            self.recording.recorder.enter(name)
            with torch._C.DisableTorchFunction():
                args, kwargs = in_edges(module, args, kwargs)
            with self.recording.recorder.draws.allowed():
                return self.recording.record("call_module", name, args, kwargs, run=module)
        padding = clears_padding(module, args, kwargs)
        scope = self.recording.recorder.scope if name is None else name
        with self.recording.recorder.inside(scope):
            if padding is None:
                return original(module, *args, **kwargs)
            return self._encode(original, module, padding, args, kwargs)

    def _encode(
        self, original: Callable[..., Any], encoder: Any, padding: Tensor, args: Any, kwargs: Any
    ) -> Any:
        """Calls a transformer encoder; see :mod:`lightning_gpp.capture.tracing.nested_padding`."""
        training = encoder.layers[0].training

        def clear(output: Tensor) -> Tensor:
            cleared: Tensor = self.recording.call(clear_padding, output, padding, training)
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
        return self.recording.record(
            "call_function",
            apply_function,
            (function, *args),
            {},
            run=lambda _, *rest: original(function, *rest),
        )

    def _whole(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A library function that becomes one node."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not is_recording():
                return function(*args, **kwargs)
            return self.recording.record("call_function", function, args, kwargs)

        return call

    def _patches(self) -> AbstractContextManager[None]:
        tracer = self
        call, apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"].__func__
        script_call = torch._C.ScriptFunction.__call__

        def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not is_recording():
                return call(module, *args, **kwargs)
            return tracer._module_call(call, module, args, kwargs)

        def function_apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs or not is_recording():
                return apply(function, *args, **kwargs)
            return tracer._apply(apply, function, args)

        def scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_recording():
                return script_call(function, *args, **kwargs)
            return tracer.recording.record("call_function", function, args, kwargs)

        own = vars(self.module)
        return replaced(
            [
                (nn.Module, "__call__", module_call),
                (torch._C.ScriptFunction, "__call__", scripted),
                (torch.autograd.Function, "apply", classmethod(function_apply)),
                *traced_names(self.module, self.recording, is_recording),
                *whole_functions(self.module, self._whole),
                *((own, name, self._whole(run)) for name, run in self.whole_methods.items()),
            ]
        )


def is_recording() -> bool:
    """Whether calls are recorded right now, and not those inside of a recorded one."""
    return torch._C._is_torch_function_mode_enabled()
