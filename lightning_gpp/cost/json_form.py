"""Profiles and costs as versioned JSON documents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning_gpp.common.data_file import read_data_file
from lightning_gpp.common.strict_json import JsonFormat, JsonFormError
from lightning_gpp.cost.costs import Costs
from lightning_gpp.cost.profile import Profile

FORMAT = JsonFormat("lightning_gpp.profile", version=2, older=(1,))
COSTS_FORMAT = JsonFormat("lightning_gpp.costs", version=1)


def profile_to_json(profile: Profile) -> str:
    """The profile as a JSON document.

    >>> profile = Profile({}, microbatch_size=4)
    >>> profile_from_json(profile_to_json(profile)) == profile
    True
    """
    return FORMAT.dumps(profile)


def profile_from_json(text: str, *, source: str = "profile") -> Profile:
    """Reads :func:`profile_to_json`'s form.

    Args:
        text: the document.
        source: where it comes from, for error messages.

    Raises:
        ValueError: it is not a profile; the text names the place.
    """
    return FORMAT.loads(Profile, text, source=source)


def costs_to_json(costs: Costs) -> str:
    """The costs, profiles of all sizes and kinds, as a JSON document.

    >>> costs = Costs((Profile({}, microbatch_size=4), Profile({}, microbatch_size=2)))
    >>> costs_from_json(costs_to_json(costs)) == costs
    True
    """
    return COSTS_FORMAT.dumps(costs)


def costs_from_json(text: str, *, source: str = "costs") -> Costs:
    """Reads :func:`costs_to_json`'s form; arguments and errors as for a profile."""
    return COSTS_FORMAT.loads(Costs, text, source=source)


def load_costs(path: str | Path) -> Costs:
    """Reads a file that holds costs or one profile, in JSON or YAML.

    Raises:
        ValueError: the file is not of that form; the text names it, the key, and what was expected.
        FileNotFoundError: there is no such file.
    """
    data = read_data_file(path)
    form = data.get("format") if isinstance(data, Mapping) else None
    if form == FORMAT.name:
        return Costs((FORMAT.from_data(Profile, data, source=str(path)),))
    if form == COSTS_FORMAT.name:
        return COSTS_FORMAT.from_data(Costs, data, source=str(path))
    raise JsonFormError(
        f'{path}: expected "format": "{COSTS_FORMAT.name}" or "{FORMAT.name}", got {form!r}'
    )
