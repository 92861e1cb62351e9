"""Devices timed on the machine at hand, when a run begins.

An accelerator is given as much as fills it, many times in a row, and is waited for once: a wait
after each would time launches, and what fits into its cache would not time its memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.optim import Optimizer

from lightning_gpp.common.torch_device import is_accelerator, synchronize
from lightning_gpp.spmd.costs.speeds import DeviceSpeeds, measured_speeds
from lightning_gpp.spmd.run.collectives import Collectives
from lightning_gpp.strategy.spmd.sharded_optimizer import ELEMENTWISE

_SIDE = 384
"""Side of the matrices whose product a CPU is timed with: some milliseconds on a slow core."""

_SIDES = tuple(1 << power for power in range(9, 14))
"""On an accelerator: from 512, a launch more than a product on a large one, to 8192."""

_GOLDEN = 0.6180339887
"""The fractions of its multiples are spread over [0, 1)."""

_COPIED_BYTES, _STREAMED_BYTES = 1 << 24, 1 << 28
"""More than the caches of a core; and of an accelerator (50 MB on an H100), a power of 4 larger."""

_STRETCH_S, _TURN_S = 0.1, 0.01
"""Of every kind of work in a round, and of one kind before the next has its turn: many time slices
of a scheduler, so that a core that others use, too, looks as slow as it is, for all work alike."""

LEAST_ROUNDS, MOST_ROUNDS = 4, 12
_AGREE = 0.02
"""Of the work of all devices."""


@dataclass(frozen=True, slots=True)
class TimedWork:
    """A kind of work.

    Attributes:
        do: does it once.
        amount: how much that is: operations, bytes, launches.
    """

    do: Callable[[], object]
    amount: float


def typical_update(optimizers: Sequence[Optimizer], device: torch.device) -> TimedWork | None:
    """A step that takes as long per byte trained as those of some optimizers, as far as one can.

    Half of the bytes that they train are in parameters of this size or larger (small ones stay in
    a core's cache), and it is the optimizer of that parameter. On an accelerator it takes as many
    of them together as fill it, but no more than there are. None where nothing is trained, and
    for optimizers that are not of :mod:`torch.optim`, whose arguments nobody knows.
    """
    trained = [
        (parameter, group, type(optimizer))
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    trained.sort(key=lambda each: each[0].nbytes)
    before = np.cumsum([parameter.nbytes for parameter, _, _ in trained])
    if not trained or not before[-1]:
        return None
    like, group, kind = trained[int(np.searchsorted(before, before[-1] / 2))]
    if kind not in ELEMENTWISE or kind is torch.optim.SparseAdam:
        return None
    most_bytes = _STREAMED_BYTES // 2 if is_accelerator(device) else _COPIED_BYTES
    count = min(like.numel(), most_bytes // like.element_size())
    copies = most_bytes // (count * like.element_size()) if is_accelerator(device) else 1
    parameters = [
        torch.nn.Parameter(torch.ones(count, dtype=like.dtype, device=device))
        for _ in range(min(copies, len(trained)))
    ]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = kind(parameters)
    options = {name: value for name, value in group.items() if name != "params"}
    optimizer.param_groups[0].update(options)
    return TimedWork(optimizer.step, sum(parameter.nbytes for parameter in parameters))


def measure_speeds(
    device: torch.device, group: Collectives | None = None, update: TimedWork | None = None
) -> DeviceSpeeds:
    """All ranks: how fast each device is while all of them compute; all ranks get the same.

    What a device is busy with beside this may come and go. So all are timed in short rounds that
    they begin together, until those rounds with an even number and those with an odd one say the
    same of the devices' shares; of all rounds the median counts.

    Args:
        device: of this rank.
        group: the ranks; this device alone if not given.
        update: of the optimizer, by bytes, on all of them; not timed if not given.
    """
    times = _times(device, update)
    rounds = [_of_all(times(), group, device)]
    while not is_settled(rounds):
        rounds.append(_of_all(times(), group, device))
    flop_s, byte_s, *update_s, launch_s = np.median(rounds, axis=0).T
    return measured_speeds(1 / flop_s, 1 / byte_s, launch_s, update_s[0] if update else None)


def is_settled(rounds: Sequence[Sequence[Sequence[float]]]) -> bool:
    """Whether another round would hardly change the devices' shares, or has no prospect of it.

    Args:
        rounds: seconds of every kind of work on every device, shape ``(rounds, devices, kinds)``.
    """
    if len(rounds) < LEAST_ROUNDS:
        return False
    # Launches, the last kind, scatter more than the others and count for less.
    speeds = [1 / np.median(rounds[first::2], axis=0)[:, :-1] for first in (0, 1)]
    one, other = (each / each.sum(axis=0) for each in speeds)
    return len(rounds) >= MOST_ROUNDS or bool(np.abs(one - other).max() <= _AGREE)


def _of_all(own: list[float], group: Collectives | None, device: torch.device) -> list[list[float]]:
    """Times of all ranks; they begin the next round together."""
    if group is None:
        return [own]
    shapes = [(len(own),)] * group.num_ranks
    tensor = torch.tensor(own, dtype=torch.float32, device=device)
    every = group.all_gather(tensor, shapes, is_grouped=False, purpose="timing the devices")
    return [each.tolist() for each in every]


_Turn = Callable[[], tuple[float, int]]
"""A turn of one kind of work: how long it took, and how often the work was done."""


def _times(device: torch.device, update: TimedWork | None) -> Callable[[], list[float]]:
    """Measures the seconds of one operation, of a byte of memory and of an update, of a launch."""
    works = [_product(device), _copy(device)]
    works += [update] if update else []
    short = torch.ones(1, device=device)
    works.append(TimedWork(lambda: torch.add(short, 1), 1))
    turns = [_turn_of(work.do, device) for work in works]

    def measure() -> list[float]:
        """The mean of each; a median would leave out the times in which others had the core."""
        spent_s, counts = [0.0] * len(works), [0] * len(works)
        while min(spent_s) < _STRETCH_S:
            for kind, turn in enumerate(turns):
                passed_s, count = turn()
                spent_s[kind] += passed_s
                counts[kind] += count
        return [spent_s[k] / (counts[k] * work.amount) for k, work in enumerate(works)]

    return measure


# Results are written into memory that there is: new pages take longer than what is written to them.


def _product(device: torch.device) -> TimedWork:
    """A product of matrices: on an accelerator of those among some sizes that suit it best."""

    def product(side: int) -> TimedWork:
        row = torch.arange(1, side + 1, device=device) * _GOLDEN % 1
        square = row.outer(row)  # numbers that are all alike take less power: clocks would be high
        out = torch.empty_like(square)
        return TimedWork(lambda: torch.mm(square, square, out=out), 2 * side**3)

    if not is_accelerator(device):
        return product(_SIDE)
    return product(filling_side(lambda side: _seconds(product(side), device)))


def filling_side(seconds: Callable[[int], float]) -> int:
    """The side of those square matrices whose product does most operations per second.

    None is tried that would take longer than a round gives to all products.

    Args:
        seconds: what the product of matrices of a side takes.
    """
    found: dict[int, float] = {}
    for side in _SIDES:
        found[side] = seconds(side)
        if 8 * found[side] > _STRETCH_S:
            break
    return max(found, key=lambda side: side**3 / found[side])


def _copy(device: torch.device) -> TimedWork:
    """A sum of large vectors, which reads as many bytes as it writes."""

    def copy(size_bytes: int) -> TimedWork:
        long = torch.ones(size_bytes // 4, device=device)
        out = torch.empty_like(long)
        return TimedWork(lambda: torch.add(long, 1, out=out), 2 * size_bytes)

    size_bytes, work = _COPIED_BYTES, copy(_COPIED_BYTES)
    while is_accelerator(device) and size_bytes < _STREAMED_BYTES:
        if 4 * _seconds(work, device) > _TURN_S:
            break  # who is so slow has no such cache
        size_bytes *= 4
        work = copy(size_bytes)
    return work


def _seconds(work: TimedWork, device: torch.device) -> float:
    passed_s, count = _turn_of(work.do, device)()
    return passed_s / count


def _turn_of(do: Callable[[], object], device: torch.device) -> _Turn:
    """Turns of a kind of work, after one that does not count."""
    if is_accelerator(device):
        count = 1
        while _queued_s(do, device, count) < _TURN_S:
            count *= 2
        return adapted_turn(lambda count: _queued_s(do, device, count), count)
    _host_turn(do)
    return lambda: _host_turn(do)


def adapted_turn(seconds: Callable[[int], float], count: int) -> _Turn:
    """Turns that stay about as long as they should be, whoever else uses the device.

    Two processes have a GPU in slices: one that falls into the first turn makes the work look long,
    and turns of so little of it would have to be many.

    Args:
        seconds: what so much work takes.
        count: how much of it there is in the first turn.
    """

    def turn() -> tuple[float, int]:
        nonlocal count
        done, passed_s = count, seconds(count)
        if passed_s < _TURN_S / 2:
            count *= 2
        elif passed_s > 4 * _TURN_S:
            count = max(1, count // 2)
        return passed_s, done

    return turn


def _host_turn(do: Callable[[], object]) -> tuple[float, int]:
    count, start_s = 0, time.perf_counter()
    while (passed_s := time.perf_counter() - start_s) < _TURN_S:
        do()
        count += 1
    return passed_s, count


def _queued_s(do: Callable[[], object], device: torch.device, count: int) -> float:
    """What an accelerator takes for work that is queued and waited for once, by its own clock."""
    stream = torch.accelerator.current_stream(device)
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    start.record(stream)
    for _ in range(count):
        do()
    end.record(stream)
    synchronize(device)  # a wait for the event spoils its time on Apple's GPUs before torch 2.14
    return float(start.elapsed_time(end)) / 1e3
