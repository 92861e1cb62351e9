"""Costs of the stages of a plan: seconds of compute and all-reduces, bytes of memory.

Every replica computes its own share of a micro-batch on its own device; where one number stands for
a stage, it is that of its slowest replica.

What the user's step holds on the device of the loss, beside its stages.

A step holds its batch, the outputs of the forward and their gradients: those of the whole
mini-batch where it runs once on it, those of one micro-batch where it runs for each. Not in it is
what is not known before it runs, as what a loss keeps for its backward (a softmax over a vocabulary
as much as its scores), nor that the losses of two micro-batches are compared now and then.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan.plan import Stage
from lightning_gpp.planner.request_tables import StageCompute
from lightning_gpp.schedule import find_schedule


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Peak bytes of a stage on each of its devices.

    Attributes:
        fixed_bytes: what is there all the time: parameters in all versions of them, gradients of
            the trained ones, the optimizer's state.
        activation_bytes: what the micro-batches in flight keep for their backwards.
    """

    fixed_bytes: int = 0
    activation_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All together."""
        return self.fixed_bytes + self.activation_bytes


def replica_computes(
    request: PlanRequest, stage: Stage, unit_size: float
) -> tuple[StageCompute, ...]:
    """Compute of every replica of a stage: its share of a micro-batch on its device.

    Args:
        request: the model, the devices and the costs.
        stage: the stage.
        unit_size: samples of a smallest micro-batch.
    """
    devices, kinds, shares = request.cluster.devices, request.cluster.kinds, stage.replica_multiples
    if len(kinds) == 1 and not stage.shares:
        return (kind_compute(request, stage, unit_size * shares[0], kinds[0]),) * len(shares)
    replicas = [(devices[device].kind, units) for device, units in zip(stage.devices, shares)]
    found = {
        (kind, units): kind_compute(request, stage, unit_size * units, kind)
        for kind, units in dict.fromkeys(replicas)
    }
    return tuple(found[replica] for replica in replicas)


def kind_compute(
    request: PlanRequest, stage: Stage, replica_size: float, kind: str
) -> StageCompute:
    """Compute of one replica of a stage on a device of some kind.

    Args:
        request: the model and the costs.
        stage: the stage.
        replica_size: samples of one replica's share of a micro-batch.
        kind: kind of its device.
    """
    found = request.tables.compute(stage.operators, replica_size, kind)
    if stage.recompute:
        found = found._replace(backward_s=found.backward_s + found.forward_s)
    return found


def stage_memory(
    request: PlanRequest, stage: Stage, compute: StageCompute, in_flight: int, input_bytes: float
) -> StageMemory:
    """Memory of each device of a stage.

    Args:
        request: the model and the optimizer.
        stage: the stage.
        compute: its compute at its micro-batch size.
        in_flight: micro-batches between forward and backward at the peak.
        input_bytes: bytes of a replica's share of the inputs of one micro-batch.
    """
    parameter_bytes, trained_bytes = request.tables.parameter_bytes(stage.operators)
    kept_bytes = in_flight * compute.activation_bytes
    if stage.recompute:
        kept_bytes = round(in_flight * input_bytes) + compute.activation_bytes
    held = parameter_bytes * request.held_versions.of(in_flight)
    return StageMemory(held + trained_bytes * (1 + request.optimizer_values), kept_bytes)


def users_step_bytes(request: PlanRequest, unit_size: float, in_flight: int) -> int:
    """Bytes that the user's step holds.

    Args:
        request: the model, the mini-batch and the schedule.
        unit_size: samples of a smallest micro-batch.
        in_flight: mini-batches whose steps have begun, where the pipeline does not drain.
    """
    graph, tables = request.graph, request.tables
    minibatch = request.minibatch_size / request.num_minibatches
    # The next batch is there with a copy, which tells whether it is changed.
    batches = min(in_flight, request.num_minibatches) + 2 * request.feeds_ahead
    batch = tables.edge_bytes(tuple(one.value.name for one in graph.inputs))
    outputs = tables.edge_bytes(graph.outputs)
    size = minibatch if find_schedule(request.schedule).forwards_first else unit_size
    taken = outputs.forward(size) + outputs.backward(size)
    return round(batches * batch.forward(minibatch) + taken)
