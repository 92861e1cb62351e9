"""Built-in functions that would make a plain number of a size, replaced while a forward is traced.

``len(x)`` and ``math.sqrt(n)`` ask for a real int or float and so would freeze a size; in the
namespaces of the traced forwards they give numbers that remember their node.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from lightning_gpp.capture.tracing.sizes import NumberTracer, is_traced

_MATH = {
    name: function
    for name, function in vars(math).items()
    if callable(function) and name not in ("ceil", "floor", "trunc", "prod", "fsum", "isqrt")
}


def traced_names(
    module: nn.Module, tracer: NumberTracer, is_recording: Callable[[], bool]
) -> list[tuple[dict[str, Any], str, Any]]:
    """What to put in the place of ``len`` and the functions of ``math``, by namespace and name.

    Args:
        module: is going to be traced; it is about the forwards of its parts.
        tracer: of the sizes.
        is_recording: whether a call is traced now.
    """

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
    places = [(vars(math), name, function) for name, function in functions.items()]
    for space in _namespaces(module):
        places += [(space, n, f) for n, f in functions.items() if space.get(n) is _MATH[n]]
        if "len" not in space:
            places.append((space, "len", traced_len))
    return places


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
