"""Functions that a trace would freeze, replaced under every name by which a forward calls them.

``len(x)`` and ``math.sqrt(n)`` ask for a real int or float; their stand-ins give numbers that
remember their node. ``global_mean_pool`` and its kind of torch_geometric read the number of graphs
out of an index tensor; they stay one operator each, as leaf modules do.
"""

from __future__ import annotations

import builtins
import math
import sys
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from lightning_gpp.capture.tracing.sizes import is_traced

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
    """What to put where while a module is traced.

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
    tables: dict[int, dict[Any, Any]] = {}
    places: list[Place] = []
    for part in module.modules():
        space = getattr(part.forward, "__globals__", None)
        if space is not None and id(space) not in tables:
            tables[id(space)] = space
            if "len" not in space and not space.get("__name__", "torch.").startswith("torch."):
                places.append((space, "len", traced_len))
        own = (each for each in (vars(part), *vars(part).values()) if type(each) is dict)
        tables |= {id(each): each for each in own}
    found = [
        *(p for p in _in_modules(len(sys.modules), frozenset(instead)) if p[0].get(p[1]) is p[2]),
        *_holding(tables.values(), instead.keys()),
    ]
    return places + [(space, name, instead[id(value)]) for space, name, value in found]


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


def _holding(tables: Iterable[dict[Any, Any]], functions: Collection[int]) -> list[Place]:
    """Where tables hold one of some functions, given by their ids."""
    return [
        (table, name, value)
        for table in tables
        for name, value in list(table.items())
        if id(value) in functions
    ]


@lru_cache(maxsize=1)
def _in_modules(num_loaded: int, functions: frozenset[int]) -> list[Place]:
    """In the namespaces of loaded modules: looked for anew when more modules are loaded.

    That takes 50 ms, and every layer of a graph network is traced by itself. A name that is bound
    later in a module which was there already is missed, and the number of graphs is frozen then,
    as the comparison with a second batch tells.
    """
    tables = {
        id(vars(loaded)): vars(loaded)
        for name, loaded in list(sys.modules.items())
        if not name.startswith(("torch.", "lightning_gpp.")) and hasattr(loaded, "__dict__")
    }
    return _holding(tables.values(), functions)
