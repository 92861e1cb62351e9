"""Ranks as threads, and tensors dealt to them: for tests of SPMD programs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

from helpers.threads.collectives import ThreadCollectiveHub, ThreadCollectives
from helpers.threads.start import of_ranks

T = TypeVar("T")


def on_threads(num_ranks: int, rank_function: Callable[[ThreadCollectives], T]) -> list[T]:
    """What a function returns on each of some threads that have collectives; the first error."""
    hub = ThreadCollectiveHub(num_ranks, timeout_s=100.0)
    return of_ranks(
        num_ranks, lambda rank: rank_function(ThreadCollectives(hub, rank)), [hub.waits]
    )


def random_shares(num_devices: int, draw: random.Random) -> tuple[float, ...]:
    """Unequal shares of all devices, some tiny."""
    weights = [draw.choice((0.02, 0.3, 1.0, draw.random() + 0.01)) for _ in range(num_devices)]
    total = sum(weights)
    return tuple(weight / total for weight in weights)
