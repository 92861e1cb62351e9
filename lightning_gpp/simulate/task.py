"""Tasks: what takes time in a simulated step."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpp.schedule import Action
from lightning_gpp.simulate.timeline.span import SpanKind, TransferKind

TaskKind = SpanKind | TransferKind
"""What a task is: :attr:`SpanKind.LOSS` is the user's step between the halves of a program."""


@dataclass(frozen=True, slots=True)
class Task:
    """One thing that takes time.

    Attributes:
        kind: what.
        start_s: when it starts, in seconds since the first step began.
        end_s: when it ends.
        device: the device whose stream it occupies; None for transfers and sums.
        channels: the channels that it occupies (see :func:`lightning_gpp.cluster.channels`).
        action: the action of the program that it is, or belongs to: of a transfer the send; of the
            sum of a bucket the REDUCE of one of its devices.
        size_bytes: of a message, a copy or a bucket.
        cause: index of the task whose end let it start; None where it starts with the simulation.
            Of a sum that starts before the last backward is over: that backward.
        ready_s: of transfers and sums, when they would have started had their channels been free.
    """

    kind: TaskKind
    start_s: float
    end_s: float
    device: int | None = None
    channels: tuple[str, ...] = ()
    action: Action | None = None
    size_bytes: float | None = None
    cause: int | None = None
    ready_s: float | None = None

    @property
    def duration_s(self) -> float:
        """Seconds that it takes."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class PathStep:
    """A task on the critical path.

    Attributes:
        index: of the task in the simulation.
        task: the task.
        end_s: until when it is on the path: the start of the next; its end, but for a backward in
            the middle of which a sum of gradients begins.
    """

    index: int
    task: Task
    end_s: float

    @property
    def duration_s(self) -> float:
        """Seconds on the path."""
        return self.end_s - self.task.start_s
