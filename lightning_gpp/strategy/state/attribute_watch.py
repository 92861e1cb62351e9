"""Which attributes of modules are set while user code runs.

Looking at all modules for what has changed would cost every step time in proportion to their
number. Setting an attribute of a module goes through ``nn.Module.__setattr__``, so that is where it
is seen; what writes into ``__dict__`` by itself is not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

MISSING = object()
"""In the place of a value, where there is none."""


class AttributeWatch:
    """Notes, while it is on, what the attributes of modules were before they were set.

    It is put in place when it is switched on first and stays for a whole run: exchanging a method
    of ``nn.Module`` makes Python forget what it knows of hundreds of classes.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], Any] = {}
        self._is_in_place = False

    def remove(self) -> None:
        """Takes it away again."""
        if self._is_in_place:
            self._is_in_place = False
            _watches.remove(self)
            if not _watches:
                nn.Module.__setattr__ = _set_attribute  # type: ignore[method-assign]

    def _put_in_place(self) -> None:
        if not _watches:
            nn.Module.__setattr__ = _noting  # type: ignore[assignment]
        _watches.append(self)
        self._is_in_place = True

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Attributes that are set in the body are noted; what they are now counts as before."""
        self.forget()
        if not self._is_in_place:
            self._put_in_place()
        _on.append(self)
        try:
            yield
        finally:
            _on.remove(self)

    def forget(self) -> None:
        """Forgets what was noted: what attributes are now counts as before."""
        self._before.clear()

    def changed(
        self, modules: Mapping[int, tuple[str, nn.Module]]
    ) -> Iterator[tuple[str, str, Any, Any]]:
        """The attributes of some modules that are not what they were.

        Args:
            modules: by ``id``, with their qualified names.

        Yields:
            (qualified name of the module, attribute, value before, value now), where
            :data:`MISSING` is none.
        """
        for (number, name), former in self._before.items():
            if number in modules:
                path, module = modules[number]
                now = module.__dict__.get(name, MISSING)
                if now is not former:
                    yield path, name, former, now

    def note(self, module: nn.Module, name: str) -> None:
        """An attribute is about to be set."""
        if (key := (id(module), name)) not in self._before:
            self._before[key] = module.__dict__.get(name, MISSING)


_watches: list[AttributeWatch] = []
_on: list[AttributeWatch] = []
_set_attribute = nn.Module.__setattr__


def _noting(module: nn.Module, name: str, value: Any) -> None:
    for watch in _on:
        watch.note(module, name)
    _set_attribute(module, name, value)
