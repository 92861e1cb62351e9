"""What rank 0 tells the others while they wait for something else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Aside:
    """User code outside of steps needs the others; what follows belongs to it.

    Attributes:
        place: of that code.
    """

    place: str
