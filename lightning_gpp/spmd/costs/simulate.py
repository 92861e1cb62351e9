"""A step of a program, simulated: devices wait for one another only where they exchange something.

Prices (:mod:`lightning_gpp.spmd.costs.prices`) add up: every instruction takes as long as its
slowest device. Here each device goes on when it is done, collectives begin when the last device has
come, one after the other, and sums of gradients go on in buckets beside the rest of the backward,
as :mod:`lightning_gpp.spmd.run` does it; then each steps the optimizer. So a simulated step takes
its price or less, but for the latency of a last bucket that is not full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lightning_gpp.cluster import BUCKET_BYTES
from lightning_gpp.spmd.costs.prices import Half, Machine, PriceList
from lightning_gpp.spmd.costs.share_cost import Vector
from lightning_gpp.spmd.gradient_buckets import bytes_in_bucket
from lightning_gpp.spmd.program import SpmdProgram


@dataclass(slots=True)
class _Devices:
    """How far devices and the network have come.

    Attributes:
        now_s: of every device, shape ``(num_devices,)``.
        network_s: until when collectives go on that have begun.
        bucket_bytes: of gradients that wait for others to be summed with.
    """

    now_s: Vector
    network_s: float = 0.0
    bucket_bytes: int = 0

    def go_on(self, half: Half) -> None:
        """A collective that all devices wait for, where there is one, and what each computes."""
        if half.move_s:
            self.begin(half.move_s)
            self.now_s[:] = self.network_s
        self.now_s += half.compute_s

    def begin(self, seconds: float) -> None:
        """A collective that nobody waits for yet."""
        self.network_s = max(float(self.now_s.max()), self.network_s) + seconds


def halves_in_order(program: SpmdProgram, prices: PriceList) -> Iterator[tuple[Half, int]]:
    """All that devices do in a step but the optimizer's, forwards and then backwards.

    Yields:
        It, and the bytes that wait for others to be summed with, whose sum goes on beside the rest.
    """
    for instruction in program.instructions:
        yield prices.of(instruction).halves[0], 0
    if prices.machine.is_training:
        for instruction in reversed(program.instructions):
            waiting_bytes = bytes_in_bucket(program, instruction, prices.graph)
            yield prices.of(instruction).halves[1], waiting_bytes


def updates(program: SpmdProgram, prices: PriceList) -> list[Half]:
    """The optimizer's step of everything stored."""
    value_of = prices.graph.value_of
    return [prices.stored(value_of[n], p).halves[1] for n, p in program.storage.items()]


def simulate_program(program: SpmdProgram, prices: PriceList) -> float:
    """Seconds of a step.

    Args:
        program: for as many devices as the prices.
        prices: with the program's shares.
    """
    machine = prices.machine
    devices = _Devices(np.zeros(machine.num_devices))
    for half, waiting_bytes in halves_in_order(program, prices):
        devices.bucket_bytes += waiting_bytes
        if not waiting_bytes:
            devices.go_on(half)
        elif devices.bucket_bytes >= BUCKET_BYTES:
            _sum(devices, machine)
    _sum(devices, machine)
    own_s = np.maximum(devices.now_s, devices.network_s)
    return float((own_s + sum(half.compute_s for half in updates(program, prices))).max())


def _sum(devices: _Devices, machine: Machine) -> None:
    """Begins the sum of a bucket."""
    if devices.bucket_bytes:
        devices.begin(machine.times.all_reduce_s(devices.bucket_bytes))
    devices.bucket_bytes = 0
