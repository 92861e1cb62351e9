"""Built-in functions that would make a plain number of a size, replaced while a forward is traced.

``len(x)`` and ``math.sqrt(n)`` ask for a real int or float and so would freeze a size; in the
namespaces of the traced forwards they give numbers that remember their node.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from lightning_gpp.capture.tracing.sizes import NumberTracer, is_traced

_MATH = {
    name: function
    for name, function in vars(math).items()
    if callable(function) and name not in ("ceil", "floor", "trunc", "prod", "fsum", "isqrt")
}


@contextmanager
def traced_names(
    module: nn.Module, tracer: NumberTracer, is_recording: Callable[[], bool]
) -> Iterator[None]:
    """Replaces ``len`` and the functions of ``math`` for the forwards of a module's parts."""

    def traced_len(value: Any) -> Any:
        is_tensor = isinstance(value, Tensor) and is_recording()
        return value.shape[0] if is_tensor and value.dim() else builtins.len(value)

    def traced(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs or not any(map(is_traced, args)):
                return function(*args, **kwargs)
            return tracer.call(function, *args)

        return call

    functions = {name: traced(function) for name, function in _MATH.items()}
    spaces: list[dict[str, Any]] = _namespaces(module)
    changes: list[tuple[dict[str, Any], str, Any]] = [
        (vars(math), n, f) for n, f in functions.items()
    ]
    for space in spaces:
        changes += [(space, n, f) for n, f in functions.items() if space.get(n) is _MATH[n]]
        if "len" not in space:
            changes.append((space, "len", traced_len))
    before = [(space, name, space.get(name)) for space, name, _ in changes]
    try:
        for space, name, function in changes:
            space[name] = function
        yield
    finally:
        for space, name, old in before:
            if old is None:
                del space[name]
            else:
                space[name] = old


def _namespaces(module: nn.Module) -> list[dict[str, Any]]:
    """The globals of the forwards of the user's modules."""
    found: dict[int, dict[str, Any]] = {}
    for part in module.modules():
        forward = part.forward
        function = forward.__func__ if isinstance(forward, MethodType) else forward
        if isinstance(function, FunctionType):
            space = function.__globals__
            if not space.get("__name__", "torch.").startswith("torch."):
                found[id(space)] = space
    return list(found.values())
