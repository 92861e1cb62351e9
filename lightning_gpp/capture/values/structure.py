"""Nested containers taken apart into leaves, and put together again.

``torch.utils._pytree`` knows tuples, lists, dicts, named tuples and what libraries register with
it. Dataclasses, graphs of torch_geometric and unregistered subclasses of dict, list and tuple are
handled here, without registering anything globally.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree


@dataclass(frozen=True, slots=True)
class Step:
    """How to reach one child of a container.

    Attributes:
        look_up: the function of (container, key) that returns it: ``operator.getitem``,
            ``getattr``, or :func:`child` by its position in the flattened container.
        key: what to look up.
    """

    look_up: Callable[[Any, Any], Any]
    key: Any


@dataclass(frozen=True, slots=True)
class Structure:
    """A nested container without its leaves.

    Attributes:
        container: type of the container; None for a leaf.
        steps: how to reach each child.
        children: structures of the children.
        spec: pytree's description, for containers that pytree knows, but plain lists, tuples and
            dicts.
    """

    container: type[Any] | None = None
    steps: tuple[Step, ...] = ()
    children: tuple[Structure, ...] = ()
    spec: Any = None

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """The container with ``leaves`` in it."""
        return self._take(iter(leaves))

    def _take(self, leaves: Iterator[Any]) -> Any:
        if self.container is None:
            return next(leaves)
        children = [structure._take(leaves) for structure in self.children]
        if self.spec is not None:
            return _pytree.tree_unflatten(children, self.spec)
        return _rebuild(self.container, self.steps, children)

    def paths(self) -> Iterator[tuple[Step, ...]]:
        """The steps to each leaf."""
        if self.container is None:
            yield ()
        for step, structure in zip(self.steps, self.children, strict=True):
            for path in structure.paths():
                yield (step, *path)

    def __str__(self) -> str:
        if self.container is None:
            return "a value"
        inside = ", ".join(
            f"{step.key}: {structure}"
            for step, structure in zip(self.steps, self.children, strict=True)
        )
        return f"{self.container.__name__}({inside})"


LEAF = Structure()


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Leaves and structure of a nested container.

    >>> flatten({"a": (1, 2), "b": 3})[0]
    [1, 2, 3]
    """
    level = _one_level(value)
    if level is None:
        return [value], LEAF
    level_steps, children, spec = level
    leaves: list[Any] = []
    structures = []
    for item in children:
        item_leaves, structure = flatten(item)
        leaves += item_leaves
        structures.append(structure)
    return leaves, Structure(type(value), tuple(level_steps), tuple(structures), spec)


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """A nested container of other leaves; itself if all are the same."""
    leaves, structure = flatten(value)
    mapped = [function(leaf) for leaf in leaves]
    return structure.unflatten(mapped) if any(map(operator.is_not, leaves, mapped)) else value


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """The same structure with other tensors."""
    return map_leaves(value, lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)


def leaves_of(value: Any) -> list[Any]:
    """The leaves of a nested container."""
    return flatten(value)[0]


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a nested container."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def path_text(path: Sequence[Step]) -> str:
    """A path as words joined by underscores.

    >>> path_text([Step(operator.getitem, "batch"), Step(operator.getitem, 0)])
    'batch_0'
    """
    return "_".join(str(step.key) for step in path)


def child(container: Any, position: int) -> Any:
    """The child at a position of a container that has neither items nor attributes for it."""
    level = _one_level(container)
    assert level is not None
    return level[1][position]


LOOK_UPS: frozenset[Callable[..., Any]] = frozenset({operator.getitem, getattr, child})
"""Functions that only look something up in a container."""


_KEPT = (Tensor, bool, int, float, str)
_PLAIN_LEAVES = frozenset({Tensor, Parameter, bool, int, float, str, type(None)})
"""Nearly all leaves there are."""


def _one_level(value: Any) -> tuple[Sequence[Step], list[Any], Any] | None:
    kind, spec = type(value), None
    if kind in _PLAIN_LEAVES:
        return None
    if kind not in (list, tuple, dict) and (
        kind in _pytree.SUPPORTED_NODES or _pytree.is_namedtuple_instance(value)
    ):
        own = id(value)  # torch's recursive closure would keep the value until garbage is collected
        children, spec = _pytree.tree_flatten(value, is_leaf=lambda item: id(item) != own)
    elif isinstance(value, dict):
        children = list(value.values())
    elif isinstance(value, list | tuple):
        children = list(value)
    elif is_graph_type(kind):
        named = _attributes_of(value)
        return [Step(getattr, name) for name in named], list(named.values()), None
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value) if hasattr(value, each.name)]
        return [Step(getattr, name) for name in names], [getattr(value, n) for n in names], None
    else:
        return None
    if isinstance(value, dict):
        return [Step(operator.getitem, key) for key in value], children, spec
    look_up = operator.getitem if isinstance(value, list | tuple) else child
    return _positions(look_up, len(children)), children, spec


@lru_cache
def _positions(look_up: Callable[[Any, Any], Any], size: int) -> tuple[Step, ...]:
    return tuple(Step(look_up, position) for position in range(size))


def _rebuild(container: type[Any], steps: Sequence[Step], children: list[Any]) -> Any:
    named = {step.key: value for step, value in zip(steps, children, strict=True)}
    if issubclass(container, dict):
        return container(**named) if dataclasses.is_dataclass(container) else container(named)
    if issubclass(container, list | tuple):
        return container(children)
    if is_graph_type(container):
        # Calling the class of a batch (DataBatch) would make one of a class derived from it.
        graph: Any = type.__call__(container)
        for name, value in named.items():
            graph[name] = value
        return graph
    rebuilt = object.__new__(container)
    for name, value in named.items():
        object.__setattr__(rebuilt, name, value)
    return rebuilt


# Graphs of torch_geometric ----------------------------------------------------------------------
#
# A forward may take a whole ``Data`` object. Its tensors become inputs of the captured graph, so
# only tensors travel between stages, and every forward gets an object of the same class made of its
# own tensors. What depends on the number of graphs or nodes (``num_graphs``, ``num_nodes``) is then
# computed from those tensors, as torch_geometric itself does where nothing was noted down.
#
# torch_geometric is not imported here: a value can be such a graph only if someone else did.


def is_graph_type(kind: type | None) -> bool:
    """Whether a class is ``torch_geometric.data.Data`` or derived from it (``Batch`` is)."""
    module = sys.modules.get("torch_geometric.data.data")
    return module is not None and kind is not None and issubclass(kind, module.Data)


def is_graph(value: Any) -> bool:
    """Whether a value is a graph of any kind; some (``HeteroData``) are not taken apart."""
    module = sys.modules.get("torch_geometric.data.data")
    return module is not None and isinstance(value, module.BaseData)


def _attributes_of(graph: Any) -> dict[str, Any]:
    """The attributes of a graph that belong to a captured forward, by name.

    Tensors, and numbers and strings that hold for the whole batch. Lists with an item per graph
    (the names of molecules) are left out, as is a ``num_nodes`` that node features or a batch
    vector tell.
    """
    found = {key: graph[key] for key in sorted(graph.keys())}  # they come in no fixed order
    kept = {key: value for key, value in found.items() if isinstance(value, _KEPT)}
    if any(isinstance(found.get(key), Tensor) for key in ("x", "pos", "batch")):
        kept.pop("num_nodes", None)
    return kept
