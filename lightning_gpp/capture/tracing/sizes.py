"""Numbers that remember the node that they come from.

While the concrete tracer runs, ``x.shape`` consists of these. Arithmetic on them records nodes,
so a size is computed again for every micro-batch; a decision on them (a comparison, ``range``, an
index) records a guard, which raises should the decision ever come out differently.

They are ``torch.SymInt`` because torch takes those wherever it takes an int, without looking
inside; and no subclass of ``int`` because Python reads the value of those without asking
(``range(n)``), and a size would be frozen unnoticed.
"""

from __future__ import annotations

import builtins
import math
import operator
import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn


class _TracedNumber:
    """Operators shared by the integer and the real kind.

    Args:
        tracer: the :class:`~lightning_gpp.capture.tracing.recording.Recording`.
        node: that it comes from.
        value: what the trace saw.
    """

    def __init__(self, tracer: Any, node: fx.Node, value: Any) -> None:
        self.tracer, self.fx_node, self.value = tracer, node, value
        self.node: Any = None  # torch's own

    def _frozen(self) -> Any:
        self.tracer.guard(self.fx_node, self.value)
        return self.value

    def __bool__(self) -> bool:
        return bool(self.tracer.call(operator.ne, self, 0))

    def _shown(self) -> Any:
        """The number as text, by which something may be chosen: of data it is a decision."""
        return self.value if self.fx_node.meta["of_sizes"] else self._frozen()

    def __round__(self, digits: int | None = None) -> Any:
        return self.tracer.call(round, self) if digits is None else round(self._frozen(), digits)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self


def _binary(function: Callable[[Any, Any], Any], *, reflected: bool = False) -> Any:
    def method(self: _TracedNumber, other: Any) -> Any:
        if not isinstance(other, int | float | Tensor | _TracedNumber):
            return NotImplemented
        return self.tracer.call(function, *((other, self) if reflected else (self, other)))

    return method


def _unary(function: Callable[[Any], Any]) -> Any:
    return lambda self: self.tracer.call(function, self)


def _of_value(function: Callable[..., Any], value: Callable[[Any], Any]) -> Any:
    return lambda self, *args: function(value(self), *args)


for _name in (
    *("add", "sub", "mul", "floordiv", "truediv", "mod", "pow"),
    *("lshift", "rshift", "and_", "or_", "xor"),
):
    _function, _name = getattr(operator, _name), _name.rstrip("_")
    setattr(_TracedNumber, f"__{_name}__", _binary(_function))
    setattr(_TracedNumber, f"__r{_name}__", _binary(_function, reflected=True))
for _name in ("index", "int", "float", "hash"):
    _function = getattr(operator if _name == "index" else builtins, _name)
    setattr(_TracedNumber, f"__{_name}__", _of_value(_function, _TracedNumber._frozen))
for _name in ("repr", "str", "format"):
    _function = getattr(builtins, _name)
    setattr(_TracedNumber, f"__{_name}__", _of_value(_function, _TracedNumber._shown))
for _name in ("sqrt", "log", "exp", "__ceil__", "__floor__", "__trunc__"):
    # numpy's functions of the first names look for such methods
    setattr(_TracedNumber, _name, _unary(getattr(math, _name.strip("_"))))
for _name in ("neg", "pos", "abs"):
    setattr(_TracedNumber, f"__{_name}__", _unary(getattr(operator, _name)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(_TracedNumber, f"__{_name}__", _binary(getattr(operator, _name)))


class TracedInt(_TracedNumber, torch.SymInt):
    """A traced integer; ``isinstance(n, int)`` holds."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int


class TracedFloat(_TracedNumber, torch.SymFloat):
    """A traced float, computed from sizes; ``isinstance(n, float)`` holds."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return float


def is_traced(value: Any) -> bool:
    """Whether ``value`` is a number of the trace."""
    return isinstance(value, _TracedNumber)


# Functions that would freeze them, replaced under every name by which a forward calls them -------
#
# ``len(x)`` and ``math.sqrt(n)`` ask for a real int or float; their stand-ins give numbers that
# remember their node. ``global_mean_pool`` and its kind of torch_geometric read the number of
# graphs out of an index tensor; they stay one operator each, as leaf modules do.


_MATH = [
    function
    for name, function in vars(math).items()
    if callable(function) and name not in ("ceil", "floor", "trunc", "prod", "fsum", "isqrt")
]
_PLACES = ("torch_geometric.utils", "torch_geometric.nn.pool", "torch_geometric.nn.functional")
_ABOUT_TYPES = frozenset({"is_sparse", "is_torch_sparse_tensor"})
"""These tell what a value is and read no numbers."""
_OWN_PACKAGES = ("torch_geometric.utils.", "torch_geometric.nn.")

Place = tuple[dict[Any, Any], Any, Any]
"""A namespace, a name in it, and what it means there."""


def stand_ins(
    module: nn.Module, record: Callable[..., Any], is_recording: Callable[[], bool]
) -> list[Place]:
    """Replacements to install while a module is traced.

    Args:
        module: forwards of its parts may call the functions.
        record: calls a function and records that.
        is_recording: whether a call is traced now.
    """

    def of_math(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if any(map(is_traced, args)):
                return record(function, *args, **kwargs)
            return function(*args, **kwargs)

        return call

    def traced_len(value: Any) -> Any:
        is_tensor = isinstance(value, Tensor) and is_recording()
        return value.shape[0] if is_tensor and value.dim() else builtins.len(value)

    instead = {id(function): of_math(function) for function in _MATH}
    instead |= {id(f): recorded(f, record, is_recording) for f in _library_functions()}
    places: list[Place] = [
        (space, "len", traced_len)
        for space in _spaces(module)
        if "len" not in space and not space.get("__name__", "torch.").startswith("torch.")
    ]
    places += [
        (table, name, instead[id(value)])
        for table, name, value in _names(module)
        if id(value) in instead
    ]
    return places + stored_applies(module)


def stored_applies(module: nn.Module) -> list[Place]:
    """Replacements for places that stored a reference to ``Function.apply``."""
    apply = vars(torch.autograd.Function)["apply"].__func__

    def looked_up(kind: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: kind.apply(*args, **kwargs)

    return [
        (table, name, looked_up(value.__self__))
        for table, name, value in _names(module)
        if type(value) is MethodType and value.__func__ is apply
    ]


def _spaces(module: nn.Module) -> list[dict[str, Any]]:
    """Namespaces in which forwards of its parts look up what they call."""
    spaces = [getattr(part.forward, "__globals__", {}) for part in module.modules()]
    return [*{id(each): each for each in spaces}.values()]


def _names(module: nn.Module) -> list[Place]:
    """All names there, in modules of the same packages, and in what its parts have."""
    parts = list(module.modules())
    packages = {type(part).__module__.partition(".")[0] for part in parts} - {"torch"}
    packages |= {"math", "torch_geometric"}
    loaded = [each for name, each in [*sys.modules.items()] if name.partition(".")[0] in packages]
    tables = [*(vars(each) for each in loaded if hasattr(each, "__dict__")), *_spaces(module)]
    for part in parts:
        tables += (each for each in (vars(part), *vars(part).values()) if type(each) is dict)
    unique = {id(each): each for each in tables}.values()
    return [(table, name, value) for table in unique for name, value in [*table.items()]]


def recorded(
    function: Callable[..., Any], record: Callable[..., Any], is_recording: Callable[[], bool]
) -> Callable[..., Any]:
    """A function that becomes one node where calls are recorded."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_recording():
            return record(function, *args, **kwargs)
        return function(*args, **kwargs)

    return call


def _library_functions() -> list[Callable[..., Any]]:
    return [
        value
        for place in _PLACES
        if place in sys.modules
        for value in vars(sys.modules[place]).values()
        if isinstance(value, FunctionType)
        and f"{value.__module__}.".startswith(_OWN_PACKAGES)
        and value.__name__ not in _ABOUT_TYPES
    ]
