"""The orders of the forwards and backwards of one stage.

Sources: GPipe (arXiv 1811.06965) for all forwards before all backwards; PipeDream (SOSP 2019)
for 1F1B; GraphPipe (arXiv 2406.17145, section 5.3) for kFkB and for in-flight counts by depth.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

from lightning_gpp.schedule.action import Action, Kind

Steps = tuple[int, ...]
"""Compute of a stage in order: the forward of micro-batch ``m`` is ``m``, its backward ``~m``."""


def gpipe(num_microbatches: int) -> Steps:
    """All forwards, then all backwards, both in the order of the micro-batches.

    >>> " ".join(map(str, stage_actions(1, gpipe(num_microbatches=2))))
    '1F0 1F1 1B0 1B1'
    """
    return (*range(num_microbatches), *_backwards(num_microbatches))


def gpipe_reversed(num_microbatches: int) -> Steps:
    """All forwards, then all backwards in the opposite order.

    >>> " ".join(map(str, stage_actions(1, gpipe_reversed(num_microbatches=2))))
    '1F0 1F1 1B1 1B0'
    """
    return (*range(num_microbatches), *reversed(_backwards(num_microbatches)))


@lru_cache(maxsize=256)  # stages of many plans have the same orders
def k_f_k_b(num_microbatches: int, in_flight: int, k: int) -> Steps:
    """Warm-up forwards, then k backwards and k forwards in turn, then the drain.

    A stage whose successor takes ``k`` of its micro-batches at a time gets ``k`` gradients at a
    time, so it answers with ``k`` forwards. With ``k = 1`` this is 1F1B.

    ``in_flight`` counts the micro-batches whose activations the stage holds at its peak, the one
    in the first backward included (Megatron and Zero-Bubble count one less and call it
    ``num_warmup``).

    >>> " ".join(map(str, stage_actions(0, k_f_k_b(num_microbatches=6, in_flight=4, k=2))))
    '0F0 0F1 0F2 0F3 0B0 0B1 0F4 0F5 0B2 0B3 0B4 0B5'
    """
    warmup = min(num_microbatches, in_flight)
    forwards = range(num_microbatches)
    backwards = _backwards(num_microbatches)
    steps = list(forwards[:warmup])
    for start in range(0, num_microbatches, k):
        steps += backwards[start : start + k]
        steps += forwards[warmup + start : warmup + start + k]
    return tuple(steps)


def _backwards(num_microbatches: int) -> range:
    """The backwards ``~0``, ``~1``, … in order."""
    return range(-1, -num_microbatches - 1, -1)


def stage_actions(stage: int, steps: Steps) -> list[Action]:
    """The steps of a stage as actions."""
    return [
        Action(stage, Kind.FORWARD, step) if step >= 0 else Action(stage, Kind.BACKWARD, ~step)
        for step in steps
    ]


def most_in_flight(steps: Steps) -> int:
    """Most micro-batches between forward and backward at any time.

    >>> most_in_flight(k_f_k_b(num_microbatches=8, in_flight=3, k=1))
    3
    """
    return max(itertools.accumulate(1 if step >= 0 else -1 for step in steps), default=0)
