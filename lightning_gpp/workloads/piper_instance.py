"""Piper's problem as data: operators with their ways to run, by tensor-parallel degree.

Source: "Piper: Multidimensional Planner for DNN Parallelization" (NeurIPS 2021), section 3. A
*TMPC* (time, memory, parameters, communication) is one way to run an operator on a number of
devices, for example with its activations kept or computed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tmpc:
    """One way to run an operator; Piper's symbols in brackets.

    Attributes:
        name: ``"vanilla"``, ``"activation recomp"``, …
        seconds_per_sample: forward and backward [p].
        parameter_bytes: weights to synchronise between data-parallel copies [w].
        memory_bytes_in_flight: memory for every sample in flight [a].
        memory_bytes_fixed: memory beside that [b].
        sync_forward_bytes: operator that it reads from -> extra bytes when that one is in another
            stage [c^fw].
        sync_backward_bytes: operator that reads from it -> extra bytes likewise [c^bw].
    """

    name: str
    seconds_per_sample: float
    parameter_bytes: float
    memory_bytes_in_flight: float
    memory_bytes_fixed: float
    sync_forward_bytes: Mapping[int, float]
    sync_backward_bytes: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class PiperOperator:
    """An operator.

    Attributes:
        id: its number in the file.
        name: for people.
        ways: tensor-parallel degree -> ways to run it on so many devices.
    """

    id: int
    name: str
    ways: Mapping[int, tuple[Tmpc, ...]]


@dataclass(frozen=True, slots=True)
class PiperEdge:
    """A result that one operator hands to another.

    Attributes:
        source: id of the operator that makes it.
        target: id of the operator that reads it.
        size_bytes: its bytes per sample, in one direction.
    """

    source: int
    target: int
    size_bytes: float


@dataclass(frozen=True)
class PiperInstance:
    """What Piper plans.

    Attributes:
        operators: in topological order.
        edges: without repetition.
        num_devices: devices to plan for [k].
        memory_bytes: memory of a device [M].
        bandwidth_bytes_per_s: from any device to the others.
        num_samples: samples (Piper's micro-batches) of a mini-batch [N].
    """

    operators: tuple[PiperOperator, ...]
    edges: tuple[PiperEdge, ...]
    num_devices: int
    memory_bytes: float
    bandwidth_bytes_per_s: float
    num_samples: int
