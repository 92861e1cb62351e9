"""Standing in for a method of one object, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_MISSING = object()


@contextlib.contextmanager
def instance_attribute(obj: object, name: str, value: Any) -> Iterator[None]:
    """Puts an attribute on an object while the body runs; nothing of it stays after.

    Left in place it would be pickled with the object.
    """
    before = obj.__dict__.get(name, _MISSING)
    _put(obj, name, value)
    try:
        yield
    finally:
        _put(obj, name, before)


def taken_away(obj: object, name: str, otherwise: Any) -> contextlib.AbstractContextManager[None]:
    """Undoes :func:`instance_attribute` while the body runs.

    Args:
        obj: that has the attribute.
        name: of it.
        otherwise: the attribute that the object had of its own before; None if it had none.
    """
    return instance_attribute(obj, name, _MISSING if otherwise is None else otherwise)


def _put(obj: object, name: str, value: Any) -> None:
    if value is _MISSING:
        obj.__dict__.pop(name, None)
    else:
        obj.__dict__[name] = value
