"""A stand-in for a measured profile: what operators cost judged by the bytes they touch.

An operator that is limited by memory takes the bytes it reads and writes divided by the memory
bandwidth. That is a fair *ratio* between operators of one kind, and nothing more: it knows no
floating-point operations (a convolution is underrated) and takes every parameter as read (an
embedding table is overrated). Plans made from it say "estimated"; measure where it matters.
"""

from __future__ import annotations

from lightning_gpp.cost.profile import OpProfile, Profile
from lightning_gpp.graph import ModelGraph, OpNode

ESTIMATED = "estimated"
"""The ``device`` of an estimated profile."""

MEMORY_BANDWIDTH_BYTES_PER_S = 20e9
"""Nominal memory bandwidth, in bytes per second (one CPU socket); only scales the estimate."""

BACKWARD_PER_FORWARD = 2.0
"""A backward computes two gradients, of the input and of the parameters."""


def estimate_profile(graph: ModelGraph) -> Profile:
    """A profile from sizes alone: parameters, values read and values written.

    >>> estimate_profile(ModelGraph(inputs=(), operators=(), outputs=())).device
    'estimated'
    """
    return Profile(
        operators={operator.name: _estimate(graph, operator) for operator in graph},
        microbatch_size=graph.microbatch_size,
        device=ESTIMATED,
    )


def _estimate(graph: ModelGraph, operator: OpNode) -> OpProfile:
    written_bytes = sum(value.size_bytes for value in operator.outputs)
    read_bytes = sum(graph.values[name].size_bytes for name in operator.inputs)
    read_bytes += sum(graph.parameter[name].size_bytes for name in operator.parameters)
    forward_s = (read_bytes + written_bytes) / MEMORY_BANDWIDTH_BYTES_PER_S
    return OpProfile(forward_s, BACKWARD_PER_FORWARD * forward_s, activation_bytes=written_bytes)
