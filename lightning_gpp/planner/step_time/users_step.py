"""What the user's step holds on the device of the loss, beside its stages.

A step holds its batch, the outputs of the forward and their gradients: those of the whole
mini-batch where it runs once on it, those of one micro-batch where it runs for each. Not in it is
what is not known before it runs, as what a loss keeps for its backward (a softmax over a vocabulary
as much as its scores), nor that the losses of two micro-batches are compared now and then.
"""

from __future__ import annotations

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.schedule import find_schedule


def users_step_bytes(request: PlanRequest, unit_size: float, in_flight: int) -> int:
    """Bytes that the user's step holds.

    Args:
        request: the model, the mini-batch and the schedule.
        unit_size: samples of a smallest micro-batch.
        in_flight: mini-batches whose steps have begun, where the pipeline does not drain.
    """
    graph, tables = request.graph, request.tables
    minibatch = request.minibatch_size / request.num_minibatches
    batches = min(in_flight, request.num_minibatches)
    batch = tables.edge_bytes(tuple(one.value.name for one in graph.inputs))
    outputs = tables.edge_bytes(graph.outputs)
    size = minibatch if find_schedule(request.schedule).forwards_first else unit_size
    taken = outputs.forward(size) + outputs.backward(size)
    return round(batches * batch.forward(minibatch) + taken)
