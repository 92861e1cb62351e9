"""Traces a forward by running it once on real tensors and recording every call.

A ``TorchFunctionMode`` sees the torch calls, a patched ``Module.__call__`` the leaf modules and
``Function.apply`` the custom autograd functions. Python around them just runs, so lists, dicts
and loops need no support; sizes are numbers that remember their node
(:mod:`lightning_gpp.capture.tracing.sizes`) and decisions become guards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from lightning_gpp.capture.errors import REMEDY, CaptureError, GuardError, describe, user_location
from lightning_gpp.capture.operators.observe import Observer
from lightning_gpp.capture.tracing.keep_whole import KeepWholeError, LeafPolicy
from lightning_gpp.capture.tracing.recording import Recording, run_plain
from lightning_gpp.capture.tracing.sizes import recorded, stand_ins
from lightning_gpp.capture.tracing.trace import Trace, apply_function
from lightning_gpp.capture.values.arguments import Arguments, withhold
from lightning_gpp.capture.values.placed import original as parameter_of
from lightning_gpp.common.instance_attribute import replaced
from lightning_gpp.common.transformer_layers import is_at_end, step_by_step, zero_padding

# fmt: off
_METADATA = frozenset({
    "dim", "ndim", "ndimension", "dtype", "device", "layout", "itemsize", "element_size",
    "get_device", "is_leaf", "grad_fn", "names", "requires_grad", "is_floating_point",
    "is_complex", "is_signed", "is_contiguous", "stride", "storage_offset", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mps", "is_xpu", "is_mkldnn",
    "is_inference", "is_conj", "is_neg", "_version", "data_ptr", "output_nr", "untyped_storage",
    "is_same_size", "result_type", "__hash__", "__dir__",
})
# fmt: on
_TEXTS = frozenset({"__repr__", "__format__", "__str__"})
_REFUSED = frozenset({"backward", "grad", "__set__"})


def trace_concretely(
    observer: Observer, arguments: Arguments, policy: LeafPolicy, tensors: Mapping[str, Tensor]
) -> Trace:
    """Traces a module's forward in the mode that it is in.

    Args:
        observer: of the module, watches the calls of its forward.
        arguments: of it.
        policy: which sub-modules stay whole.
        tensors: its inputs.

    Raises:
        CaptureError: Python reads a value out of a tensor, or does something else that cannot be
            recorded; the message names the line.
    """
    module, recording = observer.module, Recording(observer)
    recorder = recording.recorder
    recorder.opened = policy.opened
    inputs = {}
    for name, tensor in tensors.items():
        inputs[name] = tensor.detach().requires_grad_(tensor.requires_grad)
        if tensor.requires_grad:  # an in-place change of it must be as legal as the caller's
            inputs[name] = inputs[name].view_as(inputs[name])
        recording.add_input(name, inputs[name])
    args, kwargs = arguments.rebuild(inputs)
    try:
        with _switched(recording), _CallTracer(module, policy, recording).patches():
            result = module.forward(*args, **kwargs)
            recording.assigned_buffers(module, policy)
        recorder.check_draws()
    except CaptureError:
        raise
    except Exception as error:  # the user's code is given sizes that are no plain numbers
        recorder.check_draws()
        scope = vars(error).get("scope", "")
        text = (
            f"{describe(error)}, while it is traced with numbers that stand for those of any call"
        )
        raise KeepWholeError(f"{text}: {REMEDY}", scope) from error
    return recording.finish(withhold(result)[0])


class _CallTracer(TorchFunctionMode):
    """Records calls; see the module's docstring."""

    def __init__(self, module: nn.Module, policy: LeafPolicy, recording: Recording) -> None:
        super().__init__()
        self.module, self.policy, self.recording = module, policy, recording

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        target: Any = func
        name, op = getattr(func, "__name__", str(func)), "call_function"
        if name == "__get__":
            name = func.__self__.__name__  # type: ignore[attr-defined]
            target, args = getattr, (args[0], name)
        elif getattr(torch.Tensor, name, None) is func:
            op, target = "call_method", name
        if name in _TEXTS:
            self.recording.check_shown(args[0])
        if name in _TEXTS or name in _METADATA:
            return run_plain(op, target, args, kwargs or {})
        if name in _REFUSED:
            raise KeepWholeError(
                f"{user_location()} uses {name!r} inside of forward: {REMEDY}",
                self.recording.recorder.scope,
            )
        return self.recording.record(op, target, args, kwargs or {}, name)

    def _module_call(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        recorder, name = self.recording.recorder, self.recording.names.modules.get(id(module))
        is_foreign = name is None and next(module.parameters(), None) is not None
        if is_foreign and self.policy.is_leaf(module, ""):
            raise CaptureError(
                f"{user_location()} calls a {type(module).__name__} that is not a registered "
                "sub-module, so its parameters are not trained, moved or saved: keep it in an "
                "nn.ModuleList, an nn.ModuleDict or an attribute"
            )
        if name is not None and self.policy.is_leaf(module, name):
            recorder.location = user_location()
            recorder.check_draws()
            known = self.recording.names.tensors
            if any(id(parameter_of(each)) not in known for each in module.parameters()):
                raise KeepWholeError(
                    f"{recorder.location} calls {name!r} with other tensors in the place of its "
                    f"parameters: {REMEDY}",
                    recorder.scope,
                )
            recorder.enter(name)
            result = self.recording.record("call_module", name, args, kwargs, run=module)
            recorder.allow_draws()
            return result
        if name is None:  # it was made on the spot
            return original(module, *args, **kwargs)
        with recorder.inside(name):
            return original(module, *args, **kwargs)

    @contextmanager
    def patches(self) -> Iterator[None]:
        """Calls are recorded while the body runs."""
        tracer, record = self, self.recording.call
        call, apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"].__func__

        def traced(original: Callable[..., Any]) -> Callable[..., Any]:
            """A leaf module whose class calls it in its own way is recorded with what that does."""

            def module_call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
                name = tracer.recording.names.modules.get(id(module), "")
                if is_recording() and (
                    original is call or (name and tracer.policy.is_leaf(module, name))
                ):
                    return tracer._module_call(original, module, args, kwargs)
                return original(module, *args, **kwargs)

            return module_call

        def function_apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs or not is_recording():
                return apply(function, *args, **kwargs)
            if function is CheckpointFunction:
                return args[0](*args[2:])
            run: Callable[..., Any] = lambda _, *rest: apply(function, *rest)  # noqa: E731
            called = (function, *args)
            return tracer.recording.record("call_function", apply_function, called, {}, run=run)

        kinds = {kind for module in self.module.modules() for kind in type(module).__mro__}
        script_call = torch._C.ScriptFunction.__call__

        def scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
            return (record if is_recording() else script_call)(function, *args, **kwargs)

        places: list[tuple[Any, str, Any]] = [
            *(
                (kind, "__call__", traced(vars(kind)["__call__"]))
                for kind in kinds
                if "__call__" in vars(kind) and issubclass(kind, nn.Module)
            ),
            (torch._C.ScriptFunction, "__call__", scripted),
            (torch.autograd.Function, "apply", classmethod(function_apply)),
            *stand_ins(self.module, record, is_recording),
            *(
                (vars(each.layer), each.method, recorded(each, record, is_recording))
                for methods in self.policy.opened.values()
                for each in methods
            ),
        ]
        with replaced(places), self:
            yield


def is_recording() -> bool:
    """Whether calls are recorded right now, and not those inside of a recorded one."""
    return torch._C._is_torch_function_mode_enabled()


# What libraries do otherwise meanwhile ----------------------------------------------------------


@contextmanager
def _switched(recording: Recording) -> Iterator[None]:
    """Libraries compute step by step, and the same for every batch, while the body is traced.

    ``transformers`` leaves an attention mask away when no token of the batch is padding. That
    decision reads the data; for tracers (``is_tracing``) it always builds the mask, which computes
    the same. And no forward may seed torch's generator, which no stage would do again.
    """
    names = ("transformers.masking_utils", "transformers.modeling_utils")
    loaded: list[Any] = [sys.modules.get(name) for name in names]
    places: list[tuple[Any, str, Any]] = [
        (module, "is_tracing", lambda *args, **kwargs: True)
        for module in loaded
        if hasattr(module, "is_tracing")
    ]
    places += [
        (place, name, recorded(getattr(place, name), _refused, is_recording))
        for place in (torch, torch.random)
        for name in ("manual_seed", "seed", "set_rng_state")
    ]
    with replaced(places), step_by_step(partial(_filled, recording)):
        yield


def _filled(recording: Recording, output: Tensor, padding: Tensor, training: bool) -> Tensor:
    """Records that padding is filled with zeros.

    Raises:
        KeepWholeError: it is not at the end of every sample.
    """
    if not is_recording():  # a module that stays whole does so itself
        return output if training else zero_padding(output, padding)
    location, scope = user_location(), recording.recorder.scope
    with torch._C.DisableTorchFunction():
        if not (padding.is_meta or is_at_end(padding)):
            raise KeepWholeError(f"{location} {_NOT_AT_END}", scope, on_data=True)
    filled: Tensor = recording.call(fill_padding, output, padding, training, location, scope)
    return filled


_NOT_AT_END = (
    "passes padding that is not at the end of every sample to an nn.TransformerEncoder. What "
    "torch makes of it in evaluation depends on the other samples of the batch. Build the encoder "
    "with enable_nested_tensor=False"
)


def fill_padding(
    output: Tensor, padding: Tensor, training: bool, location: str, scope: str
) -> Tensor:
    """Node function: zeros in the place of padding where torch would leave it away.

    Raises:
        GuardError: it is not at the end of every sample.
    """
    if training or output.requires_grad:
        return output
    if not (padding.is_meta or torch.compiler.is_compiling() or is_at_end(padding)):
        raise GuardError(f"{location} {_NOT_AT_END}", location, scope)
    return zero_padding(output, padding)


def _refused(function: Callable[..., Any], *_: Any, **__: Any) -> Any:
    raise CaptureError(
        f"{user_location()} calls torch.{function.__name__} inside of forward, which would "
        f"change the random numbers of other stages: {REMEDY}"
    )
