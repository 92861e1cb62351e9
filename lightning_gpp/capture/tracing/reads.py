"""Watches plain attributes that a forward reads, because tracing fixes their values.

``self.scale`` (a number, or a tensor that is no buffer) or ``self.current_epoch`` is read once, at
capture; a pipelined forward would go on with the old value after it changed. So what was read is
kept, and compared before every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_gpp.capture.errors import GuardError
from lightning_gpp.common.instance_attribute import replaced
from lightning_gpp.common.tensor_places import num_changes

_PLAIN = (bool, int, float, str, type(None))
_LIBRARIES = ("torch.", "torch_geometric.", "torchmetrics.", "transformers.")
_MOST_ENTRIES, _DEEPEST = 64, 3
"""Of containers that are looked into before every step."""
_NOT_FROZEN = frozenset({"training", "_current_fx_name", "_jit_is_scripting"})
_ABSENT = "absent"
"""In the place of a value: forward asked for an attribute (``hasattr``, ``getattr``) in vain."""


@dataclass(frozen=True, slots=True)
class Read:
    """A plain attribute that forward read, and its value.

    Attributes:
        path: qualified name of the module.
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


@contextmanager
def watched_reads(module: nn.Module) -> Iterator[list[Read]]:
    """Collects the plain attributes that its body reads from modules of the user's own classes."""
    paths = {id(part): path for path, part in module.named_modules()}
    found: dict[tuple[str, str], Read] = {}
    absent: dict[tuple[str, str], nn.Module] = {}
    reads: list[Read] = []
    classes = {
        kind
        for part in module.modules()
        if not (kind := type(part)).__module__.startswith(_LIBRARIES)
        and not issubclass(kind, Metric)  # walking over modules hashes it, which reads its state
    }

    def spy(kind: type) -> Any:
        original: Any = kind.__getattribute__

        def read(self: Any, name: str) -> Any:
            try:
                value = original(self, name)
            except AttributeError:  # also where it is a parameter or a sub-module
                if name[0] != "_" and id(self) in paths:
                    absent[paths[id(self)], name] = self
                raise
            is_held = isinstance(value, Tensor | list | tuple | dict) and name[0] != "_"
            is_read = is_held or isinstance(value, _PLAIN)
            if is_read and name not in _NOT_FROZEN and id(self) in paths:
                key = (paths[id(self)], name)
                if key not in found:
                    found[key] = Read(*key, _content(value))
            return value

        return read

    with replaced([(kind, "__getattribute__", spy(kind)) for kind in classes]):
        yield reads
    reads += found.values()
    reads += (Read(*key, _ABSENT) for key, part in absent.items() if not hasattr(part, key[1]))


def is_as_read(module: nn.Module, reads: Sequence[Read]) -> bool:
    """Whether what was frozen is still so."""
    return all(_now(module, read) == read.value for read in reads)


def check_reads(module: nn.Module, reads: Sequence[Read]) -> None:
    """Checks that what was frozen is still so.

    Raises:
        GuardError: an attribute changed; the text names it and says what to do.
    """
    for read in reads:
        now = _now(module, read)
        if now != read.value:
            before, after = (_ABSENT if x == _ABSENT else repr(x) for x in (read.value, now))
            was = f"was {before} when the model was captured and is {after} now"
            if not isinstance(now, _PLAIN):
                was = "is not what it was when the model was captured"
            raise GuardError(
                f"forward reads self.{read.place}, which {was}; the captured graph has the old "
                "value. Make it a buffer, pass it as a tensor argument, or keep its module whole: "
                "leaf_modules=[...]",
            )


def _now(module: nn.Module, read: Read) -> Any:
    return _content(getattr(module.get_submodule(read.path), read.name, _ABSENT))


def _content(value: Any, depth: int = 0) -> Any:
    """A plain value, or what tells whether the tensors and plain values in a container changed.

    Parameters change in every step; the graph knows them.
    """
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return id(value), num_changes(value)
    is_small = isinstance(value, list | tuple | dict) and len(value) <= _MOST_ENTRIES
    if is_small and depth < _DEEPEST:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [(key, _content(item, depth + 1)) for key, item in items]
    return value if isinstance(value, _PLAIN) else (type(value).__qualname__,)
