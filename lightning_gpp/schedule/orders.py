"""The orders of forwards and backwards of one stage, and the schedules made of them.

Sources: GPipe (arXiv 1811.06965) for all forwards before all backwards; PipeDream (SOSP 2019)
for 1F1B; GraphPipe (arXiv 2406.17145, section 5.3) for kFkB and for in-flight counts by depth.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from lightning_gpp.graph import StageGraph
from lightning_gpp.schedule.action import Action, Kind
from lightning_gpp.schedule.in_flight import in_flight_microbatches

Order = Callable[[StageGraph, int, int, Sequence[int]], list[Action]]
"""(stage graph, stage, smallest micro-batches, multiple of every stage) -> actions."""


def gpipe(stage: int, num_microbatches: int) -> list[Action]:
    """All forwards, then all backwards, both in the order of the micro-batches.

    >>> " ".join(map(str, gpipe(stage=1, num_microbatches=2)))
    '1F0 1F1 1B0 1B1'
    """
    return [
        Action(stage, kind, microbatch)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
        for microbatch in range(num_microbatches)
    ]


def k_f_k_b(stage: int, num_microbatches: int, in_flight: int, k: int) -> list[Action]:
    """Warm-up forwards, then k backwards and k forwards in turn, then the drain.

    A stage whose successor takes ``k`` of its micro-batches at a time gets ``k`` gradients at a
    time, so it answers with ``k`` forwards.

    >>> " ".join(map(str, k_f_k_b(stage=0, num_microbatches=6, in_flight=4, k=2)))
    '0F0 0F1 0F2 0F3 0B0 0B1 0F4 0F5 0B2 0B3 0B4 0B5'
    """
    warmup = min(num_microbatches, in_flight)
    forwards = [Action(stage, Kind.FORWARD, i) for i in range(num_microbatches)]
    backwards = [Action(stage, Kind.BACKWARD, i) for i in range(num_microbatches)]
    order = forwards[:warmup]
    for start in range(0, num_microbatches, k):
        order += backwards[start : start + k]
        order += forwards[warmup + start : warmup + start + k]
    return order


def one_f_one_b(stage: int, num_microbatches: int, in_flight: int) -> list[Action]:
    """The 1F1B order: warm-up forwards, then B-F pairs, then the drain.

    ``in_flight`` counts the micro-batches whose activations the stage holds at its peak, the one
    in the first backward included (Megatron and Zero-Bubble count one less and call it
    ``num_warmup``).

    >>> " ".join(map(str, one_f_one_b(stage=0, num_microbatches=4, in_flight=2)))
    '0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3'
    """
    return k_f_k_b(stage, num_microbatches, in_flight, k=1)


def forward_only(stage: int, num_microbatches: int) -> list[Action]:
    """Forwards in the order of the micro-batches, for validation and prediction.

    >>> " ".join(map(str, forward_only(stage=0, num_microbatches=2)))
    '0F0 0F1'
    """
    return [Action(stage, Kind.FORWARD, microbatch) for microbatch in range(num_microbatches)]


def _gpipe(
    stages: StageGraph, stage: int, num_microbatches: int, multiples: Sequence[int]
) -> list[Action]:
    return gpipe(stage, num_microbatches // multiples[stage])


def _one_f_one_b(
    stages: StageGraph, stage: int, num_microbatches: int, multiples: Sequence[int]
) -> list[Action]:
    in_flight = in_flight_microbatches(stages, num_microbatches, multiples)[stage]
    size = multiples[stage]
    k = max(itertools.chain([1], (multiples[j] // size for j in stages.successors[stage])))
    return k_f_k_b(stage, num_microbatches // size, in_flight, k)


def _forward_only(
    stages: StageGraph, stage: int, num_microbatches: int, multiples: Sequence[int]
) -> list[Action]:
    return forward_only(stage, num_microbatches // multiples[stage])


SCHEDULES: Mapping[str, Order] = MappingProxyType({"gpipe": _gpipe, "1f1b": _one_f_one_b})
"""Training schedules by name. ``1f1b`` becomes kFkB where micro-batch sizes differ."""

FORWARD_ONLY = "forward"
"""Name of the order without backwards."""


def stage_order(
    schedule: str, stages: StageGraph, stage: int, num_microbatches: int, multiples: Sequence[int]
) -> list[Action]:
    """The compute actions of one stage.

    Raises:
        ValueError: the schedule is unknown.
    """
    if schedule == FORWARD_ONLY:
        return _forward_only(stages, stage, num_microbatches, multiples)
    check_schedule(schedule)
    return SCHEDULES[schedule](stages, stage, num_microbatches, multiples)


def check_schedule(schedule: str) -> None:
    """Raises ValueError, naming the known schedules, when there is none of this name."""
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; known schedules: {', '.join(SCHEDULES)}")
