"""What outlives an action: a rank's flights, messages that wait, and gradients on their way.

It may outlive a run of a program, too: where the pipeline does not drain, the next program takes up
the micro-batches that are still in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_gpp.runtime.payload import Payload
from lightning_gpp.runtime.stage_run import Flight
from lightning_gpp.runtime.sums.reduction import GradientReduction
from lightning_gpp.runtime.transport.transport import Tag


@dataclass(slots=True)
class RunState:
    """What one rank holds between actions.

    Attributes:
        flights: micro-batches between forward and backward, by stage and number.
        outbox: what stages of this rank have made; sends take it, or consumers on this rank.
        inbox: what has been received.
        reduction: the sums of the gradients of replicas, once a backward has come.
        put_back: stage -> puts the state back that changes once per mini-batch.
    """

    flights: dict[tuple[int, int], Flight] = field(default_factory=dict)
    outbox: dict[Tag, Payload] = field(default_factory=dict)
    inbox: dict[Tag, Payload] = field(default_factory=dict)
    reduction: GradientReduction | None = None
    put_back: dict[int, Callable[[], None]] = field(default_factory=dict)
