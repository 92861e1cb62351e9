"""Schedules as data: what planners, readers of programs and the strategy ask of an order.

A schedule says in which order every stage does its forwards and backwards; where the user's step
meets them, how many micro-batches stages hold, whether the pipeline drains before the parameters
change and how many versions of them a stage needs follow from it, and nobody asks for its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from lightning_gpp.graph import StageGraph
from lightning_gpp.schedule.in_flight import in_flight_microbatches
from lightning_gpp.schedule.orders import Steps, gpipe, gpipe_reversed, k_f_k_b

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Schedule:
    """In which order every stage does its forwards and backwards, and what follows from it.

    The functions take the stage graph, the number of smallest micro-batches, and the micro-batch
    size of every stage in units of the smallest.

    Attributes:
        name: by which users choose it.
        steps: gives the steps of every stage.
        forwards_first: whether every stage does all of its forwards before its first backward: it
            holds all micro-batches at the peak, and a program has two halves with the user's step
            in between, once, on all outputs. Otherwise that step runs for every micro-batch of the
            loss stage, in its forward.
        peak_in_flight: gives :func:`most_in_flight` of the steps of every stage.
        has_backward: whether it trains.
        flushes: whether no micro-batch is in flight when the parameters change; otherwise
            ``steps`` orders the micro-batches of all mini-batches of a program as one row.
        reverses: whether stages do their backwards in the opposite order of their forwards, which
            is known for stages without replicas that all take micro-batches of one size.
    """

    name: str
    steps: Callable[[StageGraph, int, Sequence[int]], dict[int, Steps]]
    forwards_first: bool
    peak_in_flight: Callable[[StageGraph, int, Sequence[int]], dict[int, int]]
    has_backward: bool = True
    flushes: bool = True
    reverses: bool = False

    def orders(
        self,
        stages: StageGraph,
        num_microbatches: int,
        multiples: Sequence[int],
        num_minibatches: int = 1,
    ) -> dict[int, Steps]:
        """The steps of every stage in a program.

        Args:
            stages: the stage graph.
            num_microbatches: smallest micro-batches of all mini-batches.
            multiples: micro-batch size of every stage in units of the smallest.
            num_minibatches: mini-batches, of equally many micro-batches.

        >>> from lightning_gpp.graph import StageEdge
        >>> chain = StageGraph(2, (StageEdge(0, 1, ("x",)),))
        >>> GPIPE.orders(chain, 4, (1, 1), num_minibatches=2)[1]
        (0, 1, -1, -2, 2, 3, -3, -4)
        """
        if not self.flushes:
            return self.steps(stages, num_microbatches, multiples)
        count = num_microbatches // num_minibatches
        each = self.steps(stages, count, multiples)
        return {
            stage: tuple(
                step + first if step >= 0 else step - first
                for first in range(0, num_microbatches // size, count // size)
                for step in each[stage]
            )
            for stage, size in enumerate(multiples)
        }


def _by_count(
    make: Callable[[int], _T],
    stages: StageGraph,
    num_microbatches: int,
    multiples: Sequence[int],
) -> dict[int, _T]:
    """Stage -> what is made for its number of micro-batches, where nothing else counts."""
    return {stage: make(num_microbatches // size) for stage, size in enumerate(multiples)}


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


def _forwards(num_microbatches: int) -> Steps:
    return tuple(range(num_microbatches))


_all_in_flight = partial(_by_count, int)

GPIPE = Schedule("gpipe", partial(_by_count, gpipe), True, _all_in_flight)
"""All forwards, the user's step, all backwards: any loss is exact."""

GPIPE_REVERSED = Schedule(
    "gpipe-reversed", partial(_by_count, gpipe_reversed), True, _all_in_flight, reverses=True
)
"""The same with the backwards in the opposite order, which micro-batches need that read what
earlier ones left on a stage: chunks of one graph (GNNPipe, arXiv 2308.10087)."""

ONE_F_ONE_B = Schedule("1f1b", _one_f_one_b, False, in_flight_microbatches)
"""1F1B; kFkB where micro-batch sizes differ."""

ONE_F_ONE_B_ASYNC = replace(ONE_F_ONE_B, name="1f1b-async", flushes=False)
"""1F1B that never drains: a stage steps after every mini-batch's backward while others are in
flight, so that forwards and backwards meet different weights (PipeDream, SOSP 2019)."""

FORWARD_ONLY = Schedule(
    "forward", partial(_by_count, _forwards), True, _all_in_flight, has_backward=False
)
"""No backwards, for validation and prediction."""

SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {schedule.name: schedule for schedule in (GPIPE, ONE_F_ONE_B)}
)
"""Schedules of one mini-batch by name, in the order in which they are preferred where memory
allows."""


def find_schedule(name: str) -> Schedule:
    """The training schedule of a name, those included that systems choose by themselves.

    Raises:
        ValueError: there is none; the text names the known ones.
    """
    others = (GPIPE_REVERSED, ONE_F_ONE_B_ASYNC)
    known = {**SCHEDULES, **{schedule.name: schedule for schedule in others}}
    if name not in known:
        raise ValueError(f"unknown schedule {name!r}; known schedules: {', '.join(known)}")
    return known[name]
