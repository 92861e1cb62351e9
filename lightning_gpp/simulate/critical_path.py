"""What a simulated step waits for from its start to its end: its critical path.

From the task that ends last one goes back from each task to the one whose end let it start. The
tasks on the way follow one another without a gap, so their seconds add up to the step; to make the
step shorter, one of them has to get shorter (or the order has to change).

.. code-block:: text

    device 0   | F0 | F1 |         | B0 | B1 |        F0, its message, F0, B0, its message,
    device 1        --| F0 | B0 |--                   B0, B1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_gpp.simulate.simulation import Simulation
from lightning_gpp.simulate.task import Task, TaskKind


@dataclass(frozen=True, slots=True)
class PathStep:
    """A task on the critical path.

    Attributes:
        index: of the task in the simulation.
        task: the task.
        start_s: from when on it is on the path: its start.
        end_s: until when: the start of the next; its end, but for a backward in the middle of which
            a sum of gradients begins.
        channel_s: seconds of it in which the next task was ready and only waited for a channel
            that this one occupied.
    """

    index: int
    task: Task
    start_s: float
    end_s: float
    channel_s: float = 0.0

    @property
    def duration_s(self) -> float:
        """Seconds on the path."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class CriticalPath:
    """The tasks that a step waits for, one after the other.

    Attributes:
        steps: from the start of the simulation to its end, without gaps.
    """

    steps: Sequence[PathStep]

    @property
    def duration_s(self) -> float:
        """Seconds of all together: those of the whole simulation."""
        return self.steps[-1].end_s if self.steps else 0.0

    @cached_property
    def kind_s(self) -> Mapping[TaskKind, float]:
        """Kind of task -> its seconds on the path; they add up to all of it."""
        found: dict[TaskKind, float] = {}
        for step in self.steps:
            found[step.task.kind] = found.get(step.task.kind, 0.0) + step.duration_s
        return found

    @property
    def kind_shares(self) -> Mapping[TaskKind, float]:
        """Kind of task -> its part of the path, from 0 to 1."""
        total_s = self.duration_s
        return {kind: s / total_s if total_s else 0.0 for kind, s in self.kind_s.items()}

    @property
    def channel_s(self) -> float:
        """Seconds in which what came next was ready and only waited for an occupied channel."""
        return sum(step.channel_s for step in self.steps)


def critical_path(simulation: Simulation) -> CriticalPath:
    """The critical path of a simulation; of several steps the one through all of them."""
    tasks = simulation.tasks
    if not tasks:
        return CriticalPath(())
    index: int | None = max(range(len(tasks)), key=lambda number: tasks[number].end_s)
    found: list[PathStep] = []
    after: Task | None = None
    while index is not None:
        task = tasks[index]
        end_s = task.end_s if after is None else after.start_s
        found.append(PathStep(index, task, task.start_s, end_s, _channel_s(task, after, end_s)))
        index, after = task.cause, task
    return CriticalPath(tuple(reversed(found)))


def _channel_s(task: Task, after: Task | None, end_s: float) -> float:
    """Seconds of a task in which the one after it waits for its channel."""
    if after is None or after.ready_s is None:
        return 0.0
    return max(0.0, end_s - max(task.start_s, after.ready_s))
