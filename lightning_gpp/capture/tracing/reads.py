"""Watches plain attributes that a forward reads, because tracing fixes their values.

``self.scale`` (a number, or a tensor that is no buffer) or ``self.current_epoch`` is read once, at
capture; a pipelined forward would go on with the old value after it changed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_gpp.common.instance_attribute import replaced
from lightning_gpp.common.tensor_places import num_changes

PLAIN = (bool, int, float, str, type(None))
_LIBRARIES = ("torch.", "torch_geometric.", "torchmetrics.", "transformers.")
_FOREIGN = ("torch", "torch_geometric", "torchmetrics", "transformers", "lightning", "numpy")
_OTHERS = (nn.Module, Tensor, list, tuple, dict, Enum)
_HEAP_TYPE = 1 << 9  # Python's Py_TPFLAGS_HEAPTYPE: attributes of the class can be replaced
_MOST_ENTRIES, _DEEPEST = 64, 3
"""Of containers that are looked into before every step."""
_NOT_FROZEN = frozenset({"_compiled_call_impl", "_current_fx_name", "_jit_is_scripting"})
_OWN = "lightning_gpp."
ABSENT = "absent"
"""In the place of a value: forward asked for an attribute (``hasattr``, ``getattr``) in vain."""


@dataclass(frozen=True, slots=True)
class Read:
    """A plain attribute that forward read, and its value.

    Attributes:
        path: qualified name of the module, or of what it holds.
        name: of the attribute.
        value: what it was; of a tensor another one after any change.
    """

    path: str
    name: str
    value: Any

    @property
    def place(self) -> str:
        """Qualified name of the attribute."""
        return f"{self.path}.{self.name}".removeprefix(".")

    @property
    def is_mode(self) -> bool:
        """Whether it is the training flag of a module, and not of a Trainer."""
        return self.name == "training" and self.path.rpartition(".")[2] != "trainer"


@contextmanager
def watched_reads(module: nn.Module, *, in_layers: bool = False) -> Iterator[list[Read]]:
    """Collects the plain attributes that its body reads, and does not change itself.

    Of the user's own modules, of objects of the user's own classes that those have, and of the
    Trainer.

    Args:
        module: whose forward runs in the body.
        in_layers: whether to watch modules of libraries, too, as they are traced through.
    """
    objects = {id(value): (path, value) for path, value in _objects(module, in_layers)}
    found: dict[tuple[str, str], Read] = {}
    reads: list[Read] = []

    def spy(kind: type) -> Any:
        original: Any = kind.__getattribute__

        def read(self: Any, name: str) -> Any:
            try:
                value = original(self, name)
            except AttributeError:  # also where it is a parameter or a sub-module
                if name[0] != "_":
                    note(self, name, ABSENT)
                raise
            is_held = isinstance(value, Tensor | list | tuple | dict) and name[0] != "_"
            if is_held or isinstance(value, PLAIN) or _is_function_of(self, name, value):
                note(self, name, value)
            return value

        return read

    def note(owner: Any, name: str, value: Any) -> None:
        path, _ = objects.get(id(owner), (None, None))
        caller = sys._getframe(2).f_globals.get("__name__", "")  # generated code has none
        is_ours = name == "training" and caller.startswith(_OWN)
        if path is not None and name not in _NOT_FROZEN and not is_ours:
            found.setdefault((path, name), Read(path, name, content_of(value)))

    kinds = {type(value) for _, value in objects.values()}
    with replaced([(kind, "__getattribute__", spy(kind)) for kind in kinds]):
        yield reads
    for each in found.values():
        if content_of(getattr(owner_of(module, each), each.name, ABSENT)) == each.value:
            reads.append(each)


def owner_of(module: nn.Module, read: Read) -> Any:
    """The module, or what it holds, that has an attribute."""
    return attrgetter(read.path)(module) if read.path else module


def _objects(module: nn.Module, in_layers: bool) -> Iterator[tuple[str, Any]]:
    """What is looked at, with its path from the module."""
    for path, part in module.named_modules():
        is_layer = not in_layers and type(part).__module__.startswith(_LIBRARIES)
        # Walking over modules hashes a metric, which reads its state.
        if isinstance(part, Metric) or is_layer:
            continue
        yield path, part
        for name, value in vars(part).items():
            is_trainer = name == "_trainer" and value is not None
            if is_trainer or _is_of_users_class(value):
                yield f"{path}.{'trainer' if is_trainer else name}".removeprefix("."), value


def _is_of_users_class(value: Any) -> bool:
    kind, package = type(value), type(value).__module__.partition(".")[0]
    if isinstance(value, _OTHERS) or not kind.__flags__ & _HEAP_TYPE:
        return False
    return package not in _FOREIGN and package not in sys.stdlib_module_names


def _is_function_of(owner: Any, name: str, value: Any) -> bool:
    """Whether a value is a function that was stored in a module, and no method of its class."""
    if name[0] == "_" or not callable(value) or not isinstance(owner, nn.Module):
        return False
    return name in vars(owner) and not hasattr(type(owner), name)


def content_of(value: Any, depth: int = 0) -> Any:
    """A plain value, or what tells whether the tensors and plain values in a container changed.

    Parameters change in every step; the graph knows them.
    """
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return id(value), num_changes(value)
    is_small = isinstance(value, list | tuple | dict) and len(value) <= _MOST_ENTRIES
    if is_small and depth < _DEEPEST:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [(key, content_of(item, depth + 1)) for key, item in items]
    if isinstance(value, PLAIN):
        return value
    return type(value).__qualname__, id(value) if callable(value) else 0
