"""The policies by name."""

from collections.abc import Mapping
from types import MappingProxyType

from lightning_gpp.weights.policies.flush import FLUSH
from lightning_gpp.weights.policies.none import NONE
from lightning_gpp.weights.policies.pipeoptim import (
    PIPEOPTIM,
    PIPEOPTIM_AT_PREDICTED,
    PIPEOPTIM_RELEASE,
)
from lightning_gpp.weights.policies.policy import BackwardWeights, Place, Policy
from lightning_gpp.weights.policies.spectrain import SPECTRAIN
from lightning_gpp.weights.policies.stash import STASH
from lightning_gpp.weights.policies.two_buffered import TWO_BUFFERED
from lightning_gpp.weights.policies.xpipe import XPIPE

__all__ = ["PIPEOPTIM", "POLICIES", "BackwardWeights", "Place", "Policy", "find_policy"]

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            PIPEOPTIM,
            PIPEOPTIM_AT_PREDICTED,
            PIPEOPTIM_RELEASE,
            STASH,
            TWO_BUFFERED,
            SPECTRAIN,
            XPIPE,
            FLUSH,
            NONE,
        )
    }
)
"""Policies of weights by name."""


def find_policy(name: str) -> Policy:
    """The policy of a name.

    Raises:
        ValueError: there is none; the text names the known ones.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy of weights {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]
