"""Nested containers taken apart into leaves, and put together again.

``torch.utils._pytree`` knows tuples, lists, dicts, named tuples and what libraries register with
it. Dataclasses, graphs of torch_geometric and unregistered subclasses of dict, list and tuple are
handled here, without registering anything globally.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree

from lightning_gpp.capture.values.adjacency import (
    SparseAdjacency,
    SparseParts,
    adjacency,
    is_adjacency,
    parts_of,
)
from lightning_gpp.capture.values.graph_containers import attributes_of, is_graph_type, make_graph


@dataclass(frozen=True, slots=True)
class Step:
    """How to reach one child of a container.

    Attributes:
        kind: ``"item"``, ``"attribute"`` or ``"child"`` (position in the flattened container).
        key: what to look up.
    """

    kind: str
    key: Any

    @property
    def look_up(self) -> Callable[[Any, Any], Any]:
        """The function of (container, key) that returns the child."""
        return _LOOK_UPS[self.kind]


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

    def lists(self, start: int = 0) -> Iterator[tuple[int, int]]:
        """Where the leaves of each list or tuple begin and end that holds nothing but leaves."""
        if self.container in (list, tuple) and all(c.container is None for c in self.children):
            yield start, start + len(self.children)
        for child in self.children:
            yield from child.lists(start)
            start += child.num_leaves

    @property
    def num_leaves(self) -> int:
        """How many leaves it has."""
        return 1 if self.container is None else sum(c.num_leaves for c in self.children)

    @property
    def has_graphs(self) -> bool:
        """Whether a graph of torch_geometric is in it."""
        return is_graph_type(self.container) or any(c.has_graphs for c in self.children)

    def __str__(self) -> str:
        if self.container is None:
            return "*"
        inside = ", ".join(
            f"{step.key}: {structure}"
            for step, structure in zip(self.steps, self.children, strict=True)
        )
        return f"{self.container.__name__}({inside})"


LEAF = Structure()


def flatten(value: Any, *, opens_sparse: bool = False) -> tuple[list[Any], Structure]:
    """Leaves and structure of a nested container.

    Args:
        value: the container, or a leaf.
        opens_sparse: whether sparse square matrices are containers: of their edges.

    >>> flatten({"a": (1, 2), "b": 3})[0]
    [1, 2, 3]
    """
    if type(value) in _PLAIN_LEAVES and not opens_sparse:
        return [value], LEAF
    if opens_sparse and is_adjacency(value):
        steps = tuple(Step("attribute", part) for part in SparseAdjacency.PARTS)
        return [*parts_of(value)], Structure(SparseAdjacency, steps, (LEAF,) * len(steps))
    level = _one_level(value)
    if level is None:
        return [value], LEAF
    level_steps, children, spec = level
    leaves: list[Any] = []
    structures = []
    for item in children:
        if type(item) in _PLAIN_LEAVES and not opens_sparse:
            leaves.append(item)
            structures.append(LEAF)
            continue
        item_leaves, structure = flatten(item, opens_sparse=opens_sparse)
        leaves += item_leaves
        structures.append(structure)
    return leaves, Structure(type(value), tuple(level_steps), tuple(structures), spec)


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """A nested container of other leaves; itself if all are the same."""
    leaves, structure = flatten(value)
    mapped = [function(leaf) for leaf in leaves]
    return structure.unflatten(mapped) if any(map(operator.is_not, leaves, mapped)) else value


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Likewise with other tensors."""
    return map_leaves(value, lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)


def sendable(value: Any) -> Any:
    """A nested container with the parts of sparse matrices, which messages can carry, for them."""
    return map_leaves(
        value, lambda leaf: SparseParts(parts_of(leaf)) if is_adjacency(leaf) else leaf
    )


def received(value: Any) -> Any:
    """What :func:`sendable` was given."""
    return map_leaves(
        value, lambda leaf: adjacency(leaf.parts) if isinstance(leaf, SparseParts) else leaf
    )


def leaves_of(value: Any) -> list[Any]:
    """The leaves of a nested container."""
    leaves: list[Any] = []
    _gather(value, leaves)
    return leaves


def _gather(value: Any, leaves: list[Any]) -> None:
    kind = type(value)
    if kind in _PLAIN_LEAVES:
        leaves.append(value)
    elif kind is list or kind is tuple:
        for item in value:
            _gather(item, leaves)
    elif kind is dict:
        for item in value.values():
            _gather(item, leaves)
    else:
        leaves += flatten(value)[0]


def path_text(path: Sequence[Step]) -> str:
    """A path as words joined by underscores.

    >>> path_text([Step("item", "batch"), Step("item", 0)])
    'batch_0'
    """
    return "_".join(str(step.key) for step in path)


def child(container: Any, position: int) -> Any:
    """The child at a position of a container that has neither items nor attributes for it."""
    level = _one_level(container)
    assert level is not None
    return level[1][position]


_LOOK_UPS: dict[str, Callable[[Any, Any], Any]] = {
    "item": operator.getitem,
    "attribute": getattr,
    "child": child,
}
LOOK_UPS = frozenset(_LOOK_UPS.values())
"""Functions that only look something up in a container."""


_PLAIN_LEAVES = frozenset({Tensor, Parameter, bool, int, float, str, type(None)})
"""Nearly all leaves there are."""


def _one_level(value: Any) -> tuple[Sequence[Step], list[Any], Any] | None:
    kind = type(value)
    if kind in _PLAIN_LEAVES:
        return None
    if kind is list or kind is tuple:
        return _steps(value, len(value)), list(value), None
    if kind is dict:
        return _steps(value, len(value)), list(value.values()), None
    if kind in _pytree.SUPPORTED_NODES or _pytree.is_namedtuple_instance(value):
        own = id(value)  # torch's recursive closure would keep the value until garbage is collected
        children, spec = _pytree.tree_flatten(value, is_leaf=lambda item: id(item) != own)
        return _steps(value, len(children)), children, spec
    if isinstance(value, dict):
        return _steps(value, len(value)), list(value.values()), None
    if isinstance(value, list | tuple):
        return _steps(value, len(value)), list(value), None
    if is_graph_type(type(value)):
        named = attributes_of(value)
        return [Step("attribute", name) for name in named], list(named.values()), None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        children = [getattr(value, name) for name in names]
        return [Step("attribute", name) for name in names], children, None
    return None


def _steps(value: Any, size: int) -> Sequence[Step]:
    if isinstance(value, dict):
        return [Step("item", key) for key in value]
    return _positions("item" if isinstance(value, list | tuple) else "child", size)


@lru_cache
def _positions(kind: str, size: int) -> tuple[Step, ...]:
    return tuple(Step(kind, position) for position in range(size))


def _rebuild(container: type[Any], steps: Sequence[Step], children: list[Any]) -> Any:
    if container is SparseAdjacency:
        return adjacency(children)
    named = {step.key: value for step, value in zip(steps, children, strict=True)}
    if issubclass(container, dict):
        return container(**named) if dataclasses.is_dataclass(container) else container(named)
    if issubclass(container, list | tuple):
        return container(children)
    if is_graph_type(container):
        return make_graph(container, named)
    rebuilt = object.__new__(container)
    for name, value in named.items():
        object.__setattr__(rebuilt, name, value)
    return rebuilt
