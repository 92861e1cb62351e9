"""Functions of libraries that stay one operator, as leaf modules do.

``global_mean_pool`` and its kind read the number of graphs out of an index tensor, which a trace
would freeze. They are plain Python functions, so every name by which a forward may reach them is
bound to a stand-in while it is traced: in the namespaces of loaded modules, and in the attributes
of the traced module (``self.pool = global_mean_pool``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from types import FunctionType
from typing import Any

from torch import nn

_PLACES = ("torch_geometric.utils", "torch_geometric.nn.pool", "torch_geometric.nn.functional")
_ABOUT_TYPES = frozenset({"is_sparse", "is_torch_sparse_tensor"})
"""These tell what a value is and read no numbers."""
_OWN_PACKAGES = ("torch_geometric.utils.", "torch_geometric.nn.")

Function = Callable[..., Any]


def whole_functions(
    module: nn.Module, stand_in: Callable[[Function], Function]
) -> list[tuple[dict[Any, Any], Any, Function]]:
    """What to put in the place of the functions of torch_geometric, by namespace and name.

    Args:
        module: is going to be traced.
        stand_in: makes the function that is called instead.
    """
    functions = {id(function): function for function in _library_functions()}
    if not functions:
        return []
    stand_ins = {key: stand_in(function) for key, function in functions.items()}
    in_modules = _places_in_modules(len(sys.modules), frozenset(functions))
    places = [
        *(place for place in in_modules if place[0].get(place[1]) is place[2]),
        *_places(_tables(module), functions),
    ]
    return [(space, name, stand_ins[id(value)]) for space, name, value in places]


def _library_functions() -> list[Function]:
    spaces = [vars(sys.modules[name]) for name in _PLACES if name in sys.modules]
    return [
        value
        for space in spaces
        for value in space.values()
        if isinstance(value, FunctionType)
        and f"{value.__module__}.".startswith(_OWN_PACKAGES)
        and value.__name__ not in _ABOUT_TYPES
    ]


def _places(
    tables: Iterable[dict[Any, Any]], functions: Collection[int]
) -> list[tuple[dict[Any, Any], Any, Any]]:
    """Where tables hold one of some functions, given by their ids."""
    return [
        (space, name, value)
        for space in tables
        for name, value in list(space.items())
        if id(value) in functions
    ]


@lru_cache(maxsize=1)
def _places_in_modules(
    num_loaded: int, functions: frozenset[int]
) -> list[tuple[dict[Any, Any], Any, Any]]:
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
    return _places(tables.values(), functions)


def _tables(module: nn.Module) -> list[dict[Any, Any]]:
    """Namespaces of the forwards of the parts of ``module``, and their attributes."""
    tables: dict[int, dict[Any, Any]] = {}
    for part in module.modules():
        space = getattr(part.forward, "__globals__", None)
        if space is not None:
            tables[id(space)] = space
        tables[id(vars(part))] = vars(part)
        for value in vars(part).values():
            if type(value) is dict:
                tables[id(value)] = value
    return list(tables.values())
