"""What a whole program takes: the one judge of programs.

Prices (:mod:`lightning_gpp.spmd.costs.prices`) add up: every instruction takes as long as its
slowest device. A step is simulated: each device goes on when it is done, collectives begin when the
last device has come, one after the other, and sums of gradients go on in buckets beside the rest of
the backward, as :mod:`lightning_gpp.spmd.run` does it; then each steps the optimizer. So a step
takes its price or less, but for the latency of a last bucket that is not full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from lightning_gpp.cluster import BUCKET_BYTES
from lightning_gpp.spmd.costs.machine import AlphaBeta, CollectiveTimes, Machine, Vector
from lightning_gpp.spmd.costs.prices import Half, PriceList
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.program import Move, SpmdProgram, bytes_in_bucket


@dataclass(frozen=True, slots=True, eq=False)
class ProgramEvaluation:
    """Predicted time and memory of a program.

    Attributes:
        memory_bytes: held on every device, shape ``(num_devices,)``.
        busy_s: seconds that every device computes, likewise.
        compute_s: seconds of computations, the optimizer's step among them.
        price_s: seconds of all that is to be done, each on its slowest device: what a search makes
            least.
        step_s: of a step, simulated.
    """

    memory_bytes: Vector
    busy_s: Vector
    compute_s: float
    price_s: float
    step_s: float

    @property
    def move_s(self) -> float:
        """Seconds of everything between devices."""
        return self.price_s - self.compute_s

    def fits(self, machine: Machine) -> bool:
        """Whether every device has enough memory."""
        return bool((self.memory_bytes <= machine.memory_bytes).all())


def evaluate_program(program: SpmdProgram, graph: SpmdGraph, machine: Machine) -> ProgramEvaluation:
    """Judges a program.

    Args:
        program: of the graph, for as many devices as the machine has.
        graph: the model.
        machine: the devices.
    """
    priced = PricedProgram(program, PriceList(graph, machine, program.shares))
    every, none = priced.everything, np.zeros(machine.num_devices)
    price_s = sum(price.seconds for price in every)
    return ProgramEvaluation(
        memory_bytes=sum((price.memory_bytes for price in every), none),
        busy_s=sum((half.compute_s for price in every for half in price.halves), none),
        compute_s=price_s - sum(half.move_s for price in every for half in price.halves),
        price_s=price_s,
        step_s=_step_s(priced, machine),
    )


class PricedProgram:
    """The prices of all that a program does.

    Args:
        program: for as many devices as there are prices for.
        prices: of its graph.

    Attributes:
        everything: prices of what is stored, and of the instructions.
        updates: the optimizer's step of everything stored.
    """

    def __init__(self, program: SpmdProgram, prices: PriceList) -> None:
        value_of = prices.graph.value_of
        stored = [prices.stored(value_of[n], p) for n, p in program.storage.items()]
        self._program, self._prices = program, prices
        self._instructions = [prices.of(instruction) for instruction in program.instructions]
        self.everything = [*stored, *self._instructions]
        self.updates = [price.halves[1] for price in stored]

    def halves_in_order(self) -> Iterator[tuple[Half, int]]:
        """All that devices do in a step but the optimizer's, forwards and then backwards.

        Yields:
            It, and the bytes that wait for others to be summed with, whose sum goes on beside the
            rest.
        """
        for price in self._instructions:
            yield price.halves[0], 0
        if self._prices.machine.is_training:
            pairs = zip(self._program.instructions, self._instructions)
            for instruction, price in reversed([*pairs]):
                yield (
                    price.halves[1],
                    bytes_in_bucket(self._program, instruction, self._prices.graph),
                )


def _step_s(priced: PricedProgram, machine: Machine) -> float:
    """Seconds of a step, simulated."""
    now_s, network_s, bucket_bytes = np.zeros(machine.num_devices), 0.0, 0

    def begin(seconds: float) -> None:
        """A collective that nobody waits for yet."""
        nonlocal network_s
        network_s = max(float(now_s.max()), network_s) + seconds

    for half, waiting_bytes in priced.halves_in_order():
        bucket_bytes += waiting_bytes
        if waiting_bytes:
            if bucket_bytes >= BUCKET_BYTES:
                begin(machine.times.all_reduce_s(bucket_bytes))
                bucket_bytes = 0
            continue
        if half.move_s:
            begin(half.move_s)
            now_s[:] = network_s
        now_s += half.compute_s
    if bucket_bytes:
        begin(machine.times.all_reduce_s(bucket_bytes))
    updated_s = sum(half.compute_s for half in priced.updates)
    return float((np.maximum(now_s, network_s) + updated_s).max())


def message_bytes(program: SpmdProgram, graph: SpmdGraph, machine: Machine) -> float:
    """Bytes of all messages of a step but its inputs, padding among them, with rings and chains.

    They are what moves would take if every byte that a device sends took a second.
    """
    others = machine.num_devices - 1
    once, part = AlphaBeta(0.0, others), AlphaBeta(0.0, others / machine.num_devices)
    sent = CollectiveTimes(AlphaBeta(0.0, 2 * others), once, once, part, once, once, part)
    prices = PriceList(graph, replace(machine, times=sent), program.shares)
    return sum(
        half.move_s
        for instruction in program.instructions
        if not (isinstance(instruction, Move) and instruction.source is None)
        for half in prices.of(instruction).halves
    )
