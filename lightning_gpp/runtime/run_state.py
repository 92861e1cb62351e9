"""What outlives an action: what a rank holds, and where the pipeline meets the user's step.

It may outlive a run of a program, too: where the pipeline does not drain, the next program takes up
the micro-batches that are still in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

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


class Boundary(Protocol):
    """Where the pipeline meets the user's step; only the rank of the loss needs one."""

    def start(self, microbatch: int) -> Mapping[str, Tensor]:
        """The arguments of the pipelined forward for one micro-batch of the loss stage."""

    def finish(self, microbatch: int, outputs: Mapping[str, Any]) -> Tensor | None:
        """Takes the model's outputs; returns the weighted loss where the backward starts at it.

        Without a loss the backward starts at the gradients of the outputs.
        """

    def output_gradients(self, microbatch: int) -> Mapping[str, Sequence[Tensor | None]]:
        """Output name -> gradients of its tensors, where :meth:`finish` gave no loss."""
        raise AssertionError("the backward of a micro-batch starts at its loss")
