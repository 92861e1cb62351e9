"""The state of a rank between actions, and the interface to the user's step.

It may outlive a run of a program, too: where the pipeline does not drain, the next program takes up
the micro-batches that are still in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from lightning_gpp.runtime.payload import Payload
from lightning_gpp.runtime.stage_run import Flight
from lightning_gpp.runtime.sums import GradientReduction
from lightning_gpp.runtime.transport.transport import Tag
from lightning_gpp.schedule import Action, Program


@dataclass(frozen=True, slots=True)
class ActionRecord:
    """When an action ran, on the machine's monotonic clock (``time.monotonic_ns``).

    Work on a GPU is waited for at the end of each recorded action, so that the times are those of
    the work and not those of its launch.

    Attributes:
        action: what ran.
        start_ns: when it began.
        end_ns: when it was done.
        size_bytes: tensors in the message that was sent or received; None for other actions.
        loss_start_ns: when the user's step went on with the model's outputs, in forwards of the
            loss stage that have a loss of their own; from there to ``end_ns`` it is the user's own
            code.
    """

    action: Action
    start_ns: int
    end_ns: int
    size_bytes: int | None = None
    loss_start_ns: int | None = None


class Pace(Protocol):
    """Wraps the actions of a rank; emulation lets time pass around them."""

    def run(self, program: Program, device: int) -> AbstractContextManager[None]:
        """The body runs a device's part of a program, or a half of it."""

    def action(self, action: Action) -> AbstractContextManager[None]:
        """The body does the work of one action of that program."""

    def timed(self, record: ActionRecord) -> ActionRecord:
        """The record of the action that was done last, with the moments that it has at this pace.

        They are of a clock that all ranks share, which stands still while nothing is at this pace.
        """


@dataclass(slots=True)
class RunState:
    """What a rank holds between actions.

    Attributes:
        flights: micro-batches between forward and backward, by stage and number.
        outbox: results of this rank's stages, for sends and for readers on this rank.
        inbox: received values.
        reduction: the sums of the gradients of replicas, once a backward has come.
        put_back: stage -> puts the state back that changes once per mini-batch.
    """

    flights: dict[tuple[int, int], Flight] = field(default_factory=dict)
    outbox: dict[Tag, Payload] = field(default_factory=dict)
    inbox: dict[Tag, Payload] = field(default_factory=dict)
    reduction: GradientReduction | None = None
    put_back: dict[int, Callable[[], None]] = field(default_factory=dict)


class Boundary(Protocol):
    """The interface between pipeline and user's step, on the rank of the loss."""

    def start(self, microbatch: int) -> Mapping[str, Tensor]:
        """The arguments of the pipelined forward for one micro-batch of the loss stage."""

    def finish(self, microbatch: int, outputs: Mapping[str, Any]) -> Tensor | None:
        """Takes the model's outputs; returns the weighted loss where the backward starts at it.

        Without a loss the backward starts at the gradients of the outputs.
        """

    def output_gradients(self, microbatch: int) -> Mapping[str, Sequence[Tensor | None]]:
        """Output name -> gradients of its tensors, where :meth:`finish` gave no loss."""
        raise AssertionError("the backward of a micro-batch starts at its loss")
