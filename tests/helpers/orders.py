"""Orders of stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable


def most_in_flight(steps: Iterable[int]) -> int:
    """Most micro-batches between forward and backward at any time."""
    return max(itertools.accumulate(1 if step >= 0 else -1 for step in steps), default=0)
