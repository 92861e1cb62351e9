"""Standing in for a method of one object, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def instance_attribute(obj: object, name: str, value: Any) -> Iterator[None]:
    """Puts an attribute on an object while the body runs; nothing of it stays after.

    Left in place it would be pickled with the object.
    """
    missing = object()
    before = obj.__dict__.get(name, missing)
    obj.__dict__[name] = value
    try:
        yield
    finally:
        if before is missing:
            obj.__dict__.pop(name, None)
        else:
            obj.__dict__[name] = before


@contextlib.contextmanager
def taken_away(obj: object, name: str, otherwise: Any) -> Iterator[None]:
    """Undoes :func:`instance_attribute` while the body runs.

    Args:
        obj: that has the attribute.
        name: of it.
        otherwise: the attribute that the object had of its own before; None if it had none.
    """
    value = obj.__dict__.pop(name)
    if otherwise is not None:
        obj.__dict__[name] = otherwise
    try:
        yield
    finally:
        obj.__dict__[name] = value
