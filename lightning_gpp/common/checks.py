"""Checks of arguments, with one wording for Python, the command line and files."""

from __future__ import annotations

from collections.abc import Sequence

LARGEST = 1e30
"""No quantity of ours, in whatever unit, is larger; sums and products of such stay finite."""


def is_whole(value: object) -> bool:
    """Whether a value is a whole number.

    >>> is_whole(3), is_whole(3.0), is_whole(True), is_whole("3")
    (True, False, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a finite number, of any sign.

    >>> is_number(1e9), is_number(float("nan")), is_number(float("inf")), is_number("3")
    (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return -LARGEST <= value <= LARGEST


def check_counts(**counts: object) -> None:
    """Refuses arguments (name -> value) that are no whole numbers of at least 1.

    Raises:
        ValueError: as :func:`check_whole`.
    """
    for name, value in counts.items():
        check_whole(name, value)


def check_whole(name: str, value: object, *, least: int = 1) -> None:
    """Refuses what is no whole number, or too small a one.

    Args:
        name: what the number is, for the error.
        value: what was given.
        least: the smallest that makes sense.

    Raises:
        ValueError: the text has the name, what was expected and what was given.

    >>> check_whole("samples", 1.5)
    Traceback (most recent call last):
    ValueError: samples must be a whole number of at least 1, got 1.5
    """
    if not is_whole(value):
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    assert isinstance(value, int)
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def short_list(names: Sequence[str], *, most: int = 5) -> str:
    """Names for a message; of many, the first ones and how many more there are.

    >>> short_list(["a", "b", "c", "d"], most=2)
    'a, b and 2 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def short_repr(value: object, *, most: int = 60) -> str:
    """A value as code, for a message; the beginning of a long one.

    >>> short_repr("a long text", most=10)
    "'a long..."
    """
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
