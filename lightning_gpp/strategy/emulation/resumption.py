"""How emulated time goes on after it stood still, in a pipeline that does not drain."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resumption:
    """When emulated time goes on on all ranks, in emulated seconds; rank 0 tells it.

    Attributes:
        moment_s: by the clock as it is.
        leader_s: how far rank 0 had come.
    """

    moment_s: float
    leader_s: float
