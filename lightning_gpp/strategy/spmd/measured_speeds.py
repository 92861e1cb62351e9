"""Devices timed on the machine at hand, when a run begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.optim import Optimizer

from lightning_gpp.spmd.costs.speeds import DeviceSpeeds, measured_speeds
from lightning_gpp.spmd.run.collectives import Collectives
from lightning_gpp.strategy.spmd.sharded_optimizer import ELEMENTWISE

_SIDE = 384
"""Side of the matrices whose product is timed: some milliseconds on a slow core."""

_COPIED_BYTES = 1 << 24
"""More than the caches of a core."""

_STRETCH_S, _TURN_S = 0.1, 0.01
"""Of every kind of work in a round, and of one kind before the next has its turn: many time slices
of a scheduler, so that a core that others use, too, looks as slow as it is, for all work alike."""

LEAST_ROUNDS, MOST_ROUNDS = 4, 12
_AGREE = 0.02
"""Of the work of all devices."""


@dataclass(frozen=True, slots=True)
class Update:
    """A step of an optimizer like the user's, over one parameter.

    Attributes:
        step: takes it.
        size_bytes: of the parameter.
    """

    step: Callable[[], object]
    size_bytes: int


def typical_update(optimizers: Sequence[Optimizer], device: torch.device) -> Update | None:
    """A step that takes as long per byte as those of some optimizers, as far as one can.

    Half of the bytes that they train are in parameters of this size or larger (small ones stay in
    a core's cache), and it is the optimizer of that parameter. None where nothing is trained, and
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
    count = min(like.numel(), _COPIED_BYTES // like.element_size())
    parameter = torch.nn.Parameter(torch.ones(count, dtype=like.dtype, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = kind([parameter])
    options = {name: value for name, value in group.items() if name != "params"}
    optimizer.param_groups[0].update(options)
    return Update(optimizer.step, parameter.nbytes)


def measure_speeds(
    device: torch.device, group: Collectives | None = None, update: Update | None = None
) -> DeviceSpeeds:
    """All ranks: how fast each device is while all of them compute; all ranks get the same.

    What a device is busy with beside this may come and go. So all are timed in short rounds that
    they begin together, until those rounds with an even number and those with an odd one say the
    same of the devices' shares; of all rounds the median counts.

    Args:
        device: of this rank.
        group: the ranks; this device alone if not given.
        update: of the optimizer, on all of them; not timed if not given.
    """
    times = _times(device, update)
    rounds = [_of_all(times(), group, device)]
    while not is_settled(rounds):
        rounds.append(_of_all(times(), group, device))
    product_s, copied_s, *update_s, launch_s = np.median(rounds, axis=0).T
    return measured_speeds(
        2 * _SIDE**3 / product_s,
        2 * _COPIED_BYTES / copied_s,
        launch_s,
        update_s[0] / update.size_bytes if update else None,
    )


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
    tensor = torch.tensor(own, dtype=torch.float64, device=device)
    every = group.all_gather(tensor, shapes, is_grouped=False, purpose="timing the devices")
    return [each.tolist() for each in every]


def _times(device: torch.device, update: Update | None) -> Callable[[], list[float]]:
    """Times a product, a sum of large vectors, the optimizer's step, and a sum of small vectors."""
    square = torch.ones(_SIDE, _SIDE, device=device)
    long, short = torch.ones(_COPIED_BYTES // 4, device=device), torch.ones(1, device=device)
    product, copied = torch.empty_like(square), torch.empty_like(long)
    # Into memory that there is: new pages take longer than what is written to them.
    works: list[Callable[[], object]] = [
        lambda: torch.mm(square, square, out=product),
        lambda: torch.add(long, 1, out=copied),
    ]
    works += [update.step] if update else []
    works.append(lambda: short + 1)

    def measure() -> list[float]:
        """The mean of each; a median would leave out the times in which others had the core."""
        spent_s, counts = [0.0] * len(works), [0] * len(works)
        while min(spent_s) < _STRETCH_S:
            for kind, work in enumerate(works):
                passed_s, count = _turn(work, device)
                spent_s[kind] += passed_s
                counts[kind] += count
        return [seconds / count for seconds, count in zip(spent_s, counts)]

    for work in works:
        _turn(work, device)
    return measure


def _turn(work: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """How long a kind of work went on, and how often it was done."""
    count, start_s = 0, time.perf_counter()
    while (passed_s := time.perf_counter() - start_s) < _TURN_S:
        work()
        _wait(device)
        count += 1
    return passed_s, count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
