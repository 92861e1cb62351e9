"""Schedules as data, for planners, readers of programs and the strategy.

A schedule says in which order every stage does its forwards and backwards; where the user's step
meets them, how many micro-batches stages hold, whether the pipeline drains before the parameters
change and how many versions of them a stage needs follow from it, and nobody asks for its name.

The orders of the forwards and backwards of one stage.

Sources: GPipe (arXiv 1811.06965) for all forwards before all backwards; PipeDream (SOSP 2019)
for 1F1B; GraphPipe (arXiv 2406.17145, section 5.3) for kFkB and for in-flight counts by depth.

How many micro-batches a stage must hold so that the pipeline flows without gaps.

With one micro-batch size the answer is the depth of the stage: a chain needs ``num_stages -
stage``, parallel branches share depths (GraphPipe, arXiv 2406.17145, section 5.3). With
micro-batch sizes of their own, stages count in samples; here in *units* of the smallest
micro-batch. The published table for that case is lost; the rule below reproduces the paper's
figure 5 (10 units for sizes 1, 2, 4 and 12 for uniform size 4) and was found by simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TypeVar

from lightning_gpp.graph import StageGraph

Steps = tuple[int, ...]
"""Compute of a stage in order: the forward of micro-batch ``m`` is ``m``, its backward ``~m``."""


def gpipe(num_microbatches: int) -> Steps:
    """All forwards, then all backwards, both in the order of the micro-batches.

    >>> gpipe(num_microbatches=2)
    (0, 1, -1, -2)
    """
    return (*range(num_microbatches), *_backwards(num_microbatches))


def gpipe_reversed(num_microbatches: int) -> Steps:
    """All forwards, then all backwards in the opposite order.

    >>> gpipe_reversed(num_microbatches=2)
    (0, 1, -2, -1)
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

    >>> k_f_k_b(num_microbatches=6, in_flight=4, k=2)
    (0, 1, 2, 3, -1, -2, 4, 5, -3, -4, -5, -6)
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


def in_flight_units(stages: StageGraph, multiples: Sequence[int]) -> dict[int, int]:
    """Stage -> units of the smallest micro-batch in flight at its peak.

    For stage *i* with micro-batches of ``b_i`` units, over its successors *j*: a sink holds
    ``b_i``; ``i_j + b_j`` where ``b_i <= b_j``; else ``i_j + 2 b_i - b_j`` rounded up to a
    multiple of ``b_i``.

    >>> from lightning_gpp.graph import StageEdge, StageGraph
    >>> chain = StageGraph(3, tuple(StageEdge(i, i + 1, ("x",)) for i in range(2)))
    >>> in_flight_units(chain, [1, 2, 4]), in_flight_units(chain, [4, 4, 4])
    ({0: 10, 1: 8, 2: 4}, {0: 12, 1: 8, 2: 4})
    """
    in_flight: dict[int, int] = {}
    for stage in reversed(range(stages.num_stages)):
        size = most = multiples[stage]
        for successor in stages.successors[stage]:
            other = multiples[successor]
            need = in_flight[successor] + (other if size <= other else 2 * size - other)
            most = max(most, -(-need // size) * size)
        in_flight[stage] = most
    return dict(sorted(in_flight.items()))


def in_flight_microbatches(
    stages: StageGraph, num_microbatches: int, multiples: Sequence[int] | None = None
) -> dict[int, int]:
    """Stage -> its own micro-batches in flight at its peak under 1F1B (or kFkB).

    Args:
        stages: the stage graph.
        num_microbatches: smallest micro-batches of a mini-batch.
        multiples: micro-batch size of every stage in units of the smallest; all 1 by default.

    >>> from lightning_gpp.graph import StageEdge, StageGraph
    >>> pairs = [(0, 1), (0, 2), (1, 3), (2, 3)]
    >>> fork_join = StageGraph(4, tuple(StageEdge(*pair, ("x",)) for pair in pairs))
    >>> in_flight_microbatches(fork_join, num_microbatches=8)
    {0: 3, 1: 2, 2: 2, 3: 1}
    """
    sizes = multiples or [1] * stages.num_stages
    units = in_flight_units(stages, sizes)
    return {
        stage: min(num_microbatches // sizes[stage], units[stage] // sizes[stage])
        for stage in range(stages.num_stages)
    }


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of every stage's forwards and backwards, and its consequences.

    The functions take the stage graph, the number of smallest micro-batches, and the micro-batch
    size of every stage in units of the smallest.

    Attributes:
        name: by which users choose it.
        steps: gives the steps of every stage.
        forwards_first: whether every stage does all of its forwards before its first backward: it
            holds all micro-batches at the peak, and a program has two halves with the user's step
            in between, once, on all outputs. Otherwise that step runs for every micro-batch of the
            loss stage, in its forward.
        peak_in_flight: gives the most micro-batches between forward and backward of every stage.
        has_backward: whether it trains.
        flushes: whether no micro-batch is in flight when the parameters change; otherwise
            every micro-batch of a program is a mini-batch.
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

SCHEDULES: Mapping[str, Schedule] = {schedule.name: schedule for schedule in (GPIPE, ONE_F_ONE_B)}
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
