"""What takes time in a simulated step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lightning_gpp.schedule import Action


class TaskKind(Enum):
    """What a task is.

    Attributes:
        DATA: the host reads a mini-batch.
        PREPARE: the mini-batch is cut into micro-batches.
        FEED: the user's step before the pipelined forward.
        TURN: the user's step between the forward and the backward half of a program.
        FORWARD: the forward of a stage.
        BACKWARD: the backward of a stage.
        SEND: what a message costs its sender.
        TRANSFER: a message on its way; on channels, not on a device.
        RECEIVE: what a message costs its receiver.
        REDUCE: the sum of a bucket of gradients over the devices of its group; on channels. On a
            device: what it costs that device besides.
        FINISH: the results are joined and told to all, gradients handed out.
        OPTIMIZER: the optimizer's step.
        OVERHEAD: what the interpreter takes between two actions.
    """

    DATA = "data"
    PREPARE = "prepare"
    FEED = "feed"
    TURN = "turn"
    FORWARD = "forward"
    BACKWARD = "backward"
    SEND = "send"
    TRANSFER = "transfer"
    RECEIVE = "receive"
    REDUCE = "reduce"
    FINISH = "finish"
    OPTIMIZER = "optimizer"
    OVERHEAD = "overhead"


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
