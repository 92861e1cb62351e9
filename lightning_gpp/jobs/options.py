"""Converts options of the command line to the types that jobs expect; errors name the option.

Hydra makes of ``name=value`` whatever the value looks like: a text, a number, a list, a mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from lightning_gpp.common.checks import is_number


def as_list(name: str, value: Any) -> list[Any] | None:
    """A list; one value stands for a list of it, and None for none.

    Raises:
        ValueError: it is a mapping; the others raise it likewise.

    >>> as_list("job.planners", "graphpipe"), as_list("job.planners", ["graphpipe", "piper"])
    (['graphpipe'], ['graphpipe', 'piper'])
    """
    found = _plain(value)
    _check(name, "a list", found, is_right=not isinstance(found, Mapping))
    return found if found is None or isinstance(found, list) else [found]


def as_mapping(name: str, value: Any) -> dict[str, Any]:
    """A mapping; None stands for an empty one."""
    found = _plain({} if value is None else value)
    _check(name, "a mapping {name: value}", found, is_right=isinstance(found, Mapping))
    return {str(key): item for key, item in found.items()}


def as_text(name: str, value: Any) -> str | None:
    """A text, such as a name or a path; None or an empty one stands for none."""
    found = _plain(value)
    _check(name, "a name or a path", found, is_right=found is None or isinstance(found, str))
    return found or None


def as_flag(name: str, value: Any) -> bool:
    """True or false."""
    _check(name, "true or false", value, is_right=isinstance(value, bool))
    return bool(value)


def as_limit_s(name: str, value: Any) -> float | None:
    """Seconds above 0; None stands for no limit."""
    is_right = value is None or (is_number(value) and value > 0)
    _check(name, "a number of seconds above 0, or null", value, is_right=is_right)
    return None if value is None else float(value)


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _check(name: str, expected: str, got: Any, *, is_right: bool) -> None:
    if not is_right:
        raise ValueError(f"{name}: expected {expected}, got {_plain(got)!r}")
