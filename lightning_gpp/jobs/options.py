"""Options of the command line in the form that a job expects, with errors that name the option.

Hydra makes of ``name=value`` whatever the value looks like: a text, a number, a list, a mapping.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from omegaconf import OmegaConf

from lightning_gpp.common.checks import is_number, is_whole


def as_list(name: str, value: Any) -> list[Any] | None:
    """A list; one value stands for a list of it, and None for none.

    Raises:
        ValueError: it is a mapping.

    >>> as_list("job.planners", "graphpipe"), as_list("job.planners", ["graphpipe", "piper"])
    (['graphpipe'], ['graphpipe', 'piper'])
    """
    found = _plain(value)
    if isinstance(found, Mapping):
        raise _wrong(name, "a list", found)
    return found if found is None or isinstance(found, list) else [found]


def as_mapping(name: str, value: Any) -> dict[str, Any]:
    """A mapping; None stands for an empty one.

    Raises:
        ValueError: it is something else.
    """
    found = _plain(value)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise _wrong(name, "a mapping {name: value}", found)
    return {str(key): item for key, item in found.items()}


def as_text(name: str, value: Any) -> str | None:
    """A text, such as a name or a path; None or an empty one stands for none.

    Raises:
        ValueError: it is something else.
    """
    found = _plain(value)
    if found is None or isinstance(found, str):
        return found or None
    raise _wrong(name, "a name or a path", found)


def as_flag(name: str, value: Any) -> bool:
    """Whether.

    Raises:
        ValueError: it is neither true nor false.
    """
    if isinstance(value, bool):
        return value
    raise _wrong(name, "true or false", _plain(value))


def as_limit_s(name: str, value: Any) -> float | None:
    """Seconds above 0; None stands for no limit.

    Raises:
        ValueError: it is something else.
    """
    if value is None:
        return None
    if not is_number(value) or value <= 0:
        raise _wrong(name, "a number of seconds above 0, or null", _plain(value))
    return float(value)


def as_seed(name: str, value: Any) -> int | None:
    """What random numbers begin with; None for another in every run.

    Raises:
        ValueError: it is something else.
    """
    if value is None or (is_whole(value) and 0 <= value < 2**32):
        seed: int | None = value
        return seed
    raise _wrong(name, "a whole number from 0 to 4294967295, or null", _plain(value))


def check_names(group: str, given: Iterable[str], known: Callable[..., Any]) -> None:
    """Refuses options that a class or function does not take, before anything is started.

    Args:
        group: that they are of.
        given: their names.
        known: the class or function.

    Raises:
        ValueError: the text says what may have been meant.

    >>> check_names("trainer", ["_target_", "nam"], lambda name: None)
    Traceback (most recent call last):
    ValueError: trainer.nam is no option; did you mean trainer.name?
    """
    taken = inspect.signature(known).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return
    for name in given:
        if name not in taken and not name.startswith("_"):
            near = difflib.get_close_matches(name, taken, n=1)
            meant = f"; did you mean {group}.{near[0]}?" if near else ""
            raise ValueError(f"{group}.{name} is no option{meant}")


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _wrong(name: str, expected: str, got: Any) -> ValueError:
    return ValueError(f"{name}: expected {expected}, got {got!r}")
