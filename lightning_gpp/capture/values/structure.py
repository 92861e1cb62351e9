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
        steps = tuple(Step(getattr, part) for part in SparseAdjacency.PARTS)
        return [*parts_of(value)], Structure(SparseAdjacency, steps, (LEAF,) * len(steps))
    level = _one_level(value)
    if level is None:
        return [value], LEAF
    level_steps, children, spec = level
    leaves: list[Any] = []
    structures = []
    for item in children:
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
    """The leaves of a nested container, without its structure: that takes its time."""
    kind = type(value)
    if kind in _PLAIN_LEAVES:
        return [value]
    if kind in (list, tuple, dict):
        items = value.values() if kind is dict else value
        return [leaf for item in items for leaf in leaves_of(item)]
    return flatten(value)[0]


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


_PLAIN_LEAVES = frozenset({Tensor, Parameter, bool, int, float, str, type(None)})
"""Nearly all leaves there are."""


def _one_level(value: Any) -> tuple[Sequence[Step], list[Any], Any] | None:
    kind = type(value)
    if kind in _PLAIN_LEAVES:
        return None
    is_known = kind in _pytree.SUPPORTED_NODES or _pytree.is_namedtuple_instance(value)
    if is_known and kind not in (list, tuple, dict):
        own = id(value)  # torch's recursive closure would keep the value until garbage is collected
        children, spec = _pytree.tree_flatten(value, is_leaf=lambda item: id(item) != own)
        if isinstance(value, dict):
            return [Step(operator.getitem, key) for key in value], children, spec
        is_list = isinstance(value, list | tuple)
        return _positions(operator.getitem if is_list else child, len(children)), children, spec
    if isinstance(value, dict):
        return [Step(operator.getitem, key) for key in value], list(value.values()), None
    if isinstance(value, list | tuple):
        return _positions(operator.getitem, len(value)), list(value), None
    named = None
    if is_graph_type(kind):
        named = attributes_of(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        named = {name: getattr(value, name) for name in names if hasattr(value, name)}
    if named is None:
        return None
    return [Step(getattr, name) for name in named], list(named.values()), None


@lru_cache
def _positions(look_up: Callable[[Any, Any], Any], size: int) -> tuple[Step, ...]:
    return tuple(Step(look_up, position) for position in range(size))


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
