"""The versioned JSON form of a profile."""

from __future__ import annotations

from lightning_gpp.cost.profile import Profile
from lightning_gpp.strict_json import JsonFormat

FORMAT = JsonFormat("lightning_gpp.profile", version=1)


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
