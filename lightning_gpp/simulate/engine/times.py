"""When everything of a played program happened, slot by slot."""

from __future__ import annotations

from dataclasses import dataclass, field

NEVER = -1.0
"""Start and end of what has not happened."""

Entry = tuple[float, int, int]
"""A ready transfer in the queue: when, its place in the program, its slot."""


@dataclass(slots=True)
class Times:
    """When everything happened.

    What can happen has a *slot*: operation ``i`` in step ``k`` has ``k * num_operations + i``;
    after all operations, transfer ``j`` has ``first_transfer + k * num_transfers + j``.

    Attributes:
        num_steps: steps played.
        num_operations: of one step.
        num_transfers: of one step.
        start_s: of every slot; ``NEVER`` for what takes no time of its own.
        end_s: likewise.
        ready_s: of every slot of a transfer when it was ready.
        cause: slot whose end let it start; -1 for none.
        step_end_s: when everything of a step was over.
        stuck: stream -> the operation that it waits at for ever.
    """

    num_steps: int
    num_operations: int
    num_transfers: int
    start_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    ready_s: list[float] = field(default_factory=list)
    cause: list[int] = field(default_factory=list)
    step_end_s: list[float] = field(default_factory=list)
    stuck: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = self.num_steps * (self.num_operations + self.num_transfers)
        self.start_s, self.end_s = [NEVER] * count, [NEVER] * count
        self.ready_s = [NEVER] * (self.num_steps * self.num_transfers)
        self.cause = [-1] * count
        self.step_end_s = [0.0] * self.num_steps

    @property
    def first_transfer(self) -> int:
        """Slot of the first transfer of the first step."""
        return self.num_steps * self.num_operations
