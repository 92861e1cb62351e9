"""What is known of the stages and the devices of a recorded plan."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner import Plan


@dataclass(frozen=True, slots=True)
class StageRecord:
    """What a stage took on devices of one kind, and what the costs had said.

    Attributes:
        stage: its id in the plan.
        kind: of the devices.
        operators: what it runs.
        samples: of a replica's share of a micro-batch.
        recompute: whether the backward runs the forward again.
        forward_s: recorded seconds of a forward, without the user's step.
        backward_s: recorded seconds of a backward.
        profile_forward_s: seconds by the costs.
        profile_backward_s: likewise, with the second forward.
    """

    stage: int
    kind: str
    operators: tuple[str, ...]
    samples: float
    recompute: bool
    forward_s: float
    backward_s: float
    profile_forward_s: float
    profile_backward_s: float


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """What a device did once per step.

    Attributes:
        device: its index in the plan.
        has_loss: whether the loss is there.
        num_parameters: trained parameters (tensors) that it holds.
        parameter_bytes: bytes of them.
        optimizer_s: seconds of the optimizer; None where it had none.
        finish_s: seconds from the end of the actions to the optimizer.
    """

    device: int
    has_loss: bool
    num_parameters: int
    parameter_bytes: int
    optimizer_s: float | None = None
    finish_s: float | None = None


def devices_of(plan: Plan, graph: ModelGraph) -> list[DeviceRecord]:
    """What the devices of a plan hold; nothing is recorded yet."""
    held: dict[int, dict[str, int]] = {device: {} for device in range(plan.num_devices)}
    for stage in plan.stages:
        names = {n for operator in stage.operators for n in graph.operator[operator].parameters}
        trained = {n: graph.parameter[n].size_bytes for n in names if _is_trained(graph, n)}
        for device in stage.devices:
            held[device] |= trained
    loss_device = plan.stages[-1].devices[0]
    return [
        DeviceRecord(device, device == loss_device, len(sizes), sum(sizes.values()))
        for device, sizes in held.items()
    ]


def _is_trained(graph: ModelGraph, name: str) -> bool:
    return graph.parameter[name].requires_grad
