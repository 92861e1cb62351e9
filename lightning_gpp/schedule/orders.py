"""The orders of forwards and backwards of one stage, and the schedules made of them.

Sources: GPipe (arXiv 1811.06965) for all forwards before all backwards; PipeDream (SOSP 2019)
for 1F1B; GraphPipe (arXiv 2406.17145, section 5.3) for kFkB and for in-flight counts by depth.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from lightning_gpp.graph import StageGraph
from lightning_gpp.schedule.action import Action, Kind
from lightning_gpp.schedule.in_flight import in_flight_microbatches

Steps = tuple[int, ...]
"""Compute of a stage in order: the forward of micro-batch ``m`` is ``m``, its backward ``~m``."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """In which order every stage does its forwards and backwards, and what follows from it.

    The functions take the stage graph, the number of smallest micro-batches of the mini-batch, and
    the micro-batch size of every stage in units of the smallest.

    Attributes:
        steps: gives the steps of every stage.
        peak_in_flight: gives :func:`most_in_flight` of the steps of every stage, without them.
        forwards_first: whether every stage does all of its forwards before its first backward.
            Then it holds all micro-batches at the peak, and a program has two halves, between which
            the user's step can run once, on all outputs.
    """

    steps: Callable[[StageGraph, int, Sequence[int]], dict[int, Steps]]
    peak_in_flight: Callable[[StageGraph, int, Sequence[int]], dict[int, int]]
    forwards_first: bool


def gpipe(num_microbatches: int) -> Steps:
    """All forwards, then all backwards, both in the order of the micro-batches.

    >>> " ".join(map(str, stage_actions(1, gpipe(num_microbatches=2))))
    '1F0 1F1 1B0 1B1'
    """
    return (*range(num_microbatches), *_backwards(num_microbatches))


@lru_cache(maxsize=256)  # stages of many plans have the same orders
def k_f_k_b(num_microbatches: int, in_flight: int, k: int) -> Steps:
    """Warm-up forwards, then k backwards and k forwards in turn, then the drain.

    A stage whose successor takes ``k`` of its micro-batches at a time gets ``k`` gradients at a
    time, so it answers with ``k`` forwards.

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


def one_f_one_b(num_microbatches: int, in_flight: int) -> Steps:
    """The 1F1B order: warm-up forwards, then B-F pairs, then the drain.

    ``in_flight`` counts the micro-batches whose activations the stage holds at its peak, the one
    in the first backward included (Megatron and Zero-Bubble count one less and call it
    ``num_warmup``).

    >>> " ".join(map(str, stage_actions(0, one_f_one_b(num_microbatches=4, in_flight=2))))
    '0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3'
    """
    return k_f_k_b(num_microbatches, in_flight, k=1)


def _gpipe(stages: StageGraph, num_microbatches: int, multiples: Sequence[int]) -> dict[int, Steps]:
    return {
        stage: gpipe(num_microbatches // multiples[stage]) for stage in range(stages.num_stages)
    }


def _one_f_one_b(
    stages: StageGraph, num_microbatches: int, multiples: Sequence[int]
) -> dict[int, Steps]:
    in_flight = in_flight_microbatches(stages, num_microbatches, multiples)
    are_alike = len(set(multiples)) == 1
    steps = {}
    for stage, size in enumerate(multiples):
        others = () if are_alike else [multiples[other] for other in stages.successors[stage]]
        k = steps_in_a_row(size, others)
        steps[stage] = k_f_k_b(num_microbatches // size, in_flight[stage], k)
    return steps


def steps_in_a_row(multiple: int, successors: Sequence[int]) -> int:
    """The ``k`` of a stage: micro-batches of its successor with the smallest, in its own.

    More would starve that successor.

    Args:
        multiple: micro-batch size of the stage.
        successors: those of its successors.

    >>> steps_in_a_row(2, [8, 4])
    2
    """
    return max(1, min((other // multiple for other in successors), default=1))


def _all_in_flight(
    stages: StageGraph, num_microbatches: int, multiples: Sequence[int]
) -> dict[int, int]:
    return {stage: num_microbatches // multiples[stage] for stage in range(stages.num_stages)}


def _forward_only(
    stages: StageGraph, num_microbatches: int, multiples: Sequence[int]
) -> dict[int, Steps]:
    return {
        stage: tuple(range(num_microbatches // multiples[stage]))
        for stage in range(stages.num_stages)
    }


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        "gpipe": Schedule(_gpipe, _all_in_flight, forwards_first=True),
        "1f1b": Schedule(_one_f_one_b, in_flight_microbatches, forwards_first=False),
    }
)
"""Training schedules by name. ``1f1b`` becomes kFkB where micro-batch sizes differ."""

FORWARD_ONLY = "forward"
"""Name of the order without backwards, for validation and prediction."""


def schedule_steps(
    schedule: str, stages: StageGraph, num_microbatches: int, multiples: Sequence[int]
) -> dict[int, Steps]:
    """The forwards and backwards of every stage in order.

    Args:
        schedule: name in :data:`SCHEDULES`, or :data:`FORWARD_ONLY`.
        stages: the stage graph.
        num_microbatches: smallest micro-batches in the mini-batch.
        multiples: micro-batch size of every stage in units of the smallest.

    Raises:
        ValueError: the schedule is unknown.
    """
    if schedule == FORWARD_ONLY:
        return _forward_only(stages, num_microbatches, multiples)
    check_schedule(schedule)
    return SCHEDULES[schedule].steps(stages, num_microbatches, multiples)


def stage_actions(stage: int, steps: Steps) -> list[Action]:
    """The steps of a stage as actions."""
    return [
        Action(stage, Kind.FORWARD, step) if step >= 0 else Action(stage, Kind.BACKWARD, ~step)
        for step in steps
    ]


def most_in_flight(steps: Steps) -> int:
    """Most micro-batches between forward and backward at any time.

    >>> most_in_flight(one_f_one_b(num_microbatches=8, in_flight=3))
    3
    """
    return max(itertools.accumulate(1 if step >= 0 else -1 for step in steps), default=0)


def peak_in_flight(
    schedule: str, stages: StageGraph, num_microbatches: int, multiples: Sequence[int]
) -> dict[int, int]:
    """Stage -> :func:`most_in_flight` of its steps, without making them.

    Args:
        schedule: name in :data:`SCHEDULES`.
        stages: the stage graph.
        num_microbatches: smallest micro-batches in the mini-batch.
        multiples: micro-batch size of every stage in units of the smallest.

    Raises:
        ValueError: the schedule is unknown.
    """
    check_schedule(schedule)
    return SCHEDULES[schedule].peak_in_flight(stages, num_microbatches, multiples)


def check_schedule(schedule: str) -> None:
    """Raises ValueError, naming the known schedules, when there is none of this name."""
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; known schedules: {', '.join(SCHEDULES)}")
