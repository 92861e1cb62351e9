"""A step of an SPMD program on emulated devices, with tensors that have shapes and no numbers.

The interpreter, autograd, the collectives and the buckets are those of training, a thread for each
device; time is counted, and nobody waits for it. So models and clusters of any size can be emulated
on one machine.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from helpers.threads.collectives import (
    ThreadCollectiveHub,
    ThreadCollectives,
)
from torch import Tensor

from lightning_gpp.spmd.costs.prices import Machine
from lightning_gpp.spmd.operator_graph import SpmdGraph, ValueSource
from lightning_gpp.spmd.program import SpmdProgram
from lightning_gpp.spmd.run.emulated import EmulatedProgram
from lightning_gpp.spmd.run.interpreter import Interpreter
from lightning_gpp.spmd.run.operator_calls import OperatorCall
from lightning_gpp.spmd.run.shards import Shards

META = torch.device("meta")


def emulate_program(
    graph: SpmdGraph,
    calls: Sequence[OperatorCall],
    program: SpmdProgram,
    machine: Machine,
    *,
    timeout_s: float = 600.0,
) -> float:
    """Emulated seconds of a training step, forward and backward.

    Args:
        graph: the model.
        calls: how its operators are called, in its order.
        program: what all devices do.
        machine: the devices.
        timeout_s: limit of every wait of a device for the others.

    Raises:
        BaseException: the first error of a device.
    """
    hub = ThreadCollectiveHub(machine.num_devices, timeout_s)

    def step(rank: int) -> float:
        group = ThreadCollectives(hub, rank)
        interpreter = Interpreter(graph, calls, program, group, META)
        interpreter.pace = pace = EmulatedProgram.of(graph, program, group, machine)
        inputs = _tensors(graph, ValueSource.INPUT) if rank == 0 else None
        run = interpreter.run(_stored(graph, program, rank), inputs)
        reached = [name for name, result in run.results.items() if result.requires_grad]
        run.backward(reached, {name: torch.empty_like(run.results[name]) for name in reached})
        return pace.cursor.cursor_s

    return max(_on_threads(machine.num_devices, step, hub))


def _tensors(graph: SpmdGraph, source: ValueSource) -> dict[str, Tensor]:
    return {
        value.name: torch.empty(
            value.shape,
            dtype=getattr(torch, value.spec.dtype),
            device=META,
            requires_grad=value.requires_grad,
        )
        for value in graph.of_source(source)
    }


def _stored(graph: SpmdGraph, program: SpmdProgram, rank: int) -> dict[str, Tensor]:
    """A device's parts of parameters and buffers."""
    shards, found = Shards(program.shares), {}
    for source in (ValueSource.PARAMETER, ValueSource.BUFFER):
        for name, whole in _tensors(graph, source).items():
            shape = shards.shape(tuple(whole.shape), program.stored(name), rank)
            part = torch.empty(shape, dtype=whole.dtype, device=META)
            found[name] = part.requires_grad_(whole.requires_grad)
    return found


def _on_threads(
    num_ranks: int, step: Callable[[int], float], hub: ThreadCollectiveHub
) -> list[float]:
    """What every device's thread returns."""
    found: dict[int, float] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = step(rank)
        except BaseException as error:
            errors.append(error)
            hub.fail(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(num_ranks)]
