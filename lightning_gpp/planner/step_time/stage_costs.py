"""What the stages of a plan cost: seconds of compute, bytes of memory, the sum of gradients.

Every replica computes its own share of a micro-batch on its own device; where one number stands for
a stage, it is that of its slowest replica.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpp.cluster import Cluster, all_reduce_s
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan.plan import Stage
from lightning_gpp.planner.request_tables import StageCompute


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes that a stage keeps on each of its devices at the peak.

    Attributes:
        parameter_bytes: parameters, in all versions of them.
        gradient_bytes: gradients of the trained parameters.
        optimizer_bytes: the optimizer's state.
        activation_bytes: what the micro-batches in flight keep for their backwards.
    """

    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        """What is there all the time."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        """All together."""
        return self.fixed_bytes + self.activation_bytes


def stage_compute(request: PlanRequest, stage: Stage, unit_size: float) -> StageCompute:
    """Compute of the slowest replica of a stage, with the activations of the largest share.

    Args:
        request: the model, the devices and the costs.
        stage: the stage.
        unit_size: samples of a smallest micro-batch.
    """
    found = replica_computes(request, stage, unit_size)
    if stage.num_replicas == 1:
        return found[0]
    slowest = max(found, key=lambda compute: compute.forward_s + compute.backward_s)
    return slowest._replace(activation_bytes=max(c.activation_bytes for c in found))


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
    return StageMemory(
        parameter_bytes=parameter_bytes * request.held_versions.of(in_flight),
        gradient_bytes=trained_bytes,
        optimizer_bytes=trained_bytes * request.optimizer_values,
        activation_bytes=kept_bytes,
    )


def reduce_line(cluster: Cluster, devices: tuple[int, ...]) -> tuple[float, float]:
    """Seconds of a ring all-reduce over the replicas of a stage: at least, and per byte."""
    one_s, many_s = (all_reduce_s(cluster, devices, size, "ring") for size in (1, 10**15))
    per_byte_s = (many_s - one_s) / (10**15 - 1)
    return max(0.0, one_s - per_byte_s), per_byte_s
