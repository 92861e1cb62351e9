"""Which measurements were disturbed by what else ran on the machine.

A disturbance lasts for many operators, and only ever makes them slower. In the costs of a model it
shows as a micro-batch size that contradicts another one: it takes longer than a larger one, or
longer per sample than a smaller one.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpp.cost.profile import OpProfile, Profile

ALLOWED = 1.2
"""So many times what another size allows is no contradiction yet."""


def disturbed(profiles: Sequence[Profile]) -> list[int]:
    """Places of the profiles whose operators together took longer than another one allows.

    Args:
        profiles: of one model on one device, at different micro-batch sizes.

    >>> seconds = {1: 3.0, 2: 20.0, 4: 8.0}
    >>> disturbed([Profile({"a": OpProfile(s)}, size) for size, s in seconds.items()])
    [1]
    """
    return [
        place
        for place, profile in enumerate(profiles)
        if any(_seconds(profile) > ALLOWED * _most_s(profile, other) for other in profiles)
    ]


def quicker(one: Profile, other: Profile) -> Profile:
    """Two measurements of the same as one: every operator as it was quicker."""
    operators = {
        name: min(cost, other.operators[name], key=_operator_s)
        for name, cost in one.operators.items()
    }
    return Profile(operators, one.microbatch_size, one.device, one.is_estimated)


def _most_s(profile: Profile, other: Profile) -> float:
    """The most that a profile should take by another one."""
    return _seconds(other) * max(1.0, profile.microbatch_size / other.microbatch_size)


def _seconds(profile: Profile) -> float:
    return sum(map(_operator_s, profile.operators.values()))


def _operator_s(cost: OpProfile) -> float:
    return cost.forward_s + cost.backward_s
