"""Bytes that devices send in a step of a program."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.spmd.costs.collective_times import AlphaBeta, CollectiveTimes
from lightning_gpp.spmd.costs.prices import Machine, PriceList
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.program import ReceiveInput, SpmdProgram


def message_bytes(program: SpmdProgram, graph: SpmdGraph, machine: Machine) -> float:
    """Bytes of all messages of a step but its inputs, padding among them, with rings and chains.

    They are what moves would take if every byte that a device sends took a second.

    Args:
        program: of the graph.
        graph: the model.
        machine: the devices.
    """
    of_bytes = replace(machine, times=_sent(machine.num_devices))
    prices = PriceList(graph, of_bytes, program.shares)
    return sum(
        half.move_s
        for instruction in program.instructions
        if not isinstance(instruction, ReceiveInput)
        for half in prices.of(instruction).halves
    )


def _sent(num_devices: int) -> CollectiveTimes:
    """Bytes sent by all devices together in the place of seconds."""
    others = num_devices - 1
    once, part = AlphaBeta(0.0, others), AlphaBeta(0.0, others / num_devices)
    return CollectiveTimes(
        all_reduce=AlphaBeta(0.0, 2 * others),
        all_gather=once,
        reduce_scatter=once,
        all_to_all=part,
        broadcast=once,
        reduce=once,
        root=part,
    )
