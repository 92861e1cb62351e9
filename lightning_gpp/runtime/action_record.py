"""When a rank ran an action."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpp.schedule import Action


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
