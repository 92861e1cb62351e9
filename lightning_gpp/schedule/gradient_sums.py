"""How gradients of replicas are summed: what the runtime and predictions have to agree on."""

from __future__ import annotations

from lightning_gpp.graph import FEED
from lightning_gpp.schedule.action import Action, Kind
from lightning_gpp.schedule.program import Program


def last_backward(program: Program, device: int, stage: int, minibatch: int = 0) -> Action | None:
    """The backward of a device after which the gradients of one of its stages are final.

    The user's step may read the same parameters, so its backwards, before and after the pipelined
    forward, count for all stages of its device.

    Args:
        program: what runs.
        device: whose backward.
        stage: id of the stage in the plan.
        minibatch: of which mini-batch.

    Returns:
        The backward; None where the device has none.
    """
    counted = (stage, FEED, program.replica(program.loss_stage).stage)
    for action in reversed(program.actions[device]):
        if (
            action.kind is Kind.BACKWARD
            and program.replica(action.stage).stage in counted
            and program.minibatch(action) == minibatch
        ):
            return action
    return None
