"""Temporary replacements of attributes of objects and entries of dicts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(places: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Attributes of objects, or entries of dicts, are others while the body runs.

    Args:
        places: owner, name and value of each.
    """
    before: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in places:
            table = owner if isinstance(owner, dict) else vars(owner)
            before.append((owner, name, table.get(name, _MISSING)))
            _put(owner, name, value)
        yield
    finally:
        for place in reversed(before):
            _put(*place)


_MISSING = object()


def _put(owner: Any, name: str, value: Any) -> None:
    if not isinstance(owner, dict):
        delattr(owner, name) if value is _MISSING else setattr(owner, name, value)
    elif value is _MISSING:
        owner.pop(name, None)
    else:
        owner[name] = value


def instance_attribute(
    obj: object, name: str, value: Any
) -> contextlib.AbstractContextManager[None]:
    """Puts an attribute on an object while the body runs; nothing of it stays after.

    Left in place it would be pickled with the object.
    """
    return replaced([(vars(obj), name, value)])


def taken_away(obj: object, name: str, otherwise: Any) -> contextlib.AbstractContextManager[None]:
    """Undoes :func:`instance_attribute` while the body runs.

    Args:
        obj: that has the attribute.
        name: of it.
        otherwise: the attribute that the object had of its own before; None if it had none.
    """
    return instance_attribute(obj, name, _MISSING if otherwise is None else otherwise)
