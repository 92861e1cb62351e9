"""Plain attributes that a forward reads, and that tracing therefore froze into the graph.

``self.scale`` (a number) or ``self.current_epoch`` is read once, at capture; a pipelined forward
would go on with the old value after it changed. So what was read is kept, and compared before
every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_gpp.capture.errors import GuardError
from lightning_gpp.common.instance_attribute import replaced

_PLAIN = (bool, int, float, str, type(None))
_LIBRARIES = ("torch.", "torch_geometric.", "torchmetrics.", "transformers.")
_NOT_FROZEN = frozenset({"training", "_current_fx_name", "_jit_is_scripting"})


@dataclass(frozen=True, slots=True)
class Read:
    """A plain attribute of a module, as forward saw it.

    Attributes:
        path: qualified name of the module.
        name: of the attribute.
        value: what it was.
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
    reads: list[Read] = []
    classes = {
        kind
        for part in module.modules()
        if not (kind := type(part)).__module__.startswith(_LIBRARIES)
    }

    def spy(kind: type) -> Any:
        original: Any = kind.__getattribute__

        def read(self: Any, name: str) -> Any:
            value = original(self, name)
            if isinstance(value, _PLAIN) and name not in _NOT_FROZEN and id(self) in paths:
                key = (paths[id(self)], name)
                found.setdefault(key, Read(*key, value))
            return value

        return read

    with replaced([(kind, "__getattribute__", spy(kind)) for kind in classes]):
        yield reads
    reads += found.values()


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
            raise GuardError(
                f"forward reads self.{read.place}, which was {read.value!r} when the model was "
                f"captured and is {now!r} now, so the captured graph does not fit. Make it a "
                "buffer, pass it as a tensor argument, or keep its module whole with "
                "leaf_modules=[...]",
            )


def _now(module: nn.Module, read: Read) -> Any:
    return getattr(module.get_submodule(read.path), read.name)
