"""A method whose results are cached on the instance."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


class _CachedMethod:
    """Puts a cache in the place of the method into each instance that asks for it."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self._method
        found = instance.__dict__[self._method.__name__] = cache(partial(self._method, instance))
        return found


def cached_method(method: Method) -> Method:
    """A method whose answers are kept as long as its instance; arguments are hashable.

    >>> class Squares:
    ...     @cached_method
    ...     def of(self, number: int) -> int:
    ...         print("once")
    ...         return number * number
    >>> squares = Squares()
    >>> squares.of(3), squares.of(3)
    once
    (9, 9)
    """
    return cast(Method, _CachedMethod(method))
