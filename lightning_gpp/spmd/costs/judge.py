"""What a whole program takes: the one judge of programs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_gpp.spmd.costs.prices import Machine, PriceList
from lightning_gpp.spmd.costs.share_cost import Vector
from lightning_gpp.spmd.costs.simulate import simulate_program
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.program import Computation, SpmdProgram


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

    Raises:
        ValueError: the program is for another number of devices.
    """
    if program.num_devices != machine.num_devices:
        raise ValueError(
            f"the program is for {program.num_devices} devices, there are {machine.num_devices}"
        )
    prices = PriceList(graph, machine, program.shares)
    stored = [prices.stored(graph.value_of[n], p) for n, p in program.storage.items()]
    computed = [prices.of(i) for i in program.instructions if isinstance(i, Computation)]
    moved = [prices.of(i) for i in program.instructions if not isinstance(i, Computation)]
    every = [*stored, *computed, *moved]
    memory = sum((price.memory_bytes for price in every), np.zeros(machine.num_devices))
    halves = (half.compute_s for price in every for half in price.halves)
    busy_s = sum(halves, np.zeros(machine.num_devices))
    compute_s = sum(price.seconds for price in (*stored, *computed))
    price_s = sum(price.seconds for price in every)
    return ProgramEvaluation(memory, busy_s, compute_s, price_s, simulate_program(program, prices))
