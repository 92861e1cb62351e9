"""Simulates a program: an event simulation that knows nothing of schedules.

It reads the actions of a :class:`~lightning_gpp.schedule.Program`, the same that the runtime
executes, and takes their durations from :class:`~lightning_gpp.simulate.ProgramCosts`:

- a device runs its actions in their order; sends are handed over and the device goes on, as in the
  runtime;
- messages and sums of gradients keep the channels that they go through to themselves
  (:func:`lightning_gpp.cluster.channels`), first come, first served;
- sums of the gradients of replicas run beside the backward, bucket by bucket;
- the input is read and copied before anything else.

``program_work`` turns actions into the work that :mod:`lightning_gpp.engine` plays; what
happened is told when somebody asks. An action takes some microseconds to simulate
(``docs/prediction.md``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from lightning_gpp.engine.play import Played, play
from lightning_gpp.engine.trace import WorkTrace
from lightning_gpp.graph import FEED
from lightning_gpp.schedule import Kind, Program, ScheduleError
from lightning_gpp.simulate.program_costs import ProgramCosts
from lightning_gpp.simulate.program_work import ProgramWork
from lightning_gpp.simulate.task import PathStep, Task
from lightning_gpp.simulate.timeline.span import SpanKind


class Simulation(ProgramWork):
    """A simulated program; its tasks are computed when they are asked for.

    Args:
        program: what is simulated.
        costs: what it costs.

    Attributes:
        played: its work, played.

    Raises:
        ScheduleError: devices wait for each other for ever; the text names them and where.
    """

    def __init__(self, program: Program, costs: ProgramCosts) -> None:
        super().__init__(program, costs)
        played = play(self.work)
        assert played is not None  # no step is too long
        self.played: Played = played
        if played.stuck:
            waiting = (f"{device} at {self.items[i].action}" for device, i in played.stuck.items())
            text = "; ".join(sorted(waiting))
            raise ScheduleError(f"the program deadlocks: devices wait, {text}")

    @cached_property
    def tasks(self) -> Sequence[Task]:
        """In the order of their starts."""
        found = WorkTrace(self.work, self.played)
        shown = [*self.items, *self.messages, *self.sums]
        slots = [slot for slot, what in enumerate(shown) if what.kind is not None]
        slots.sort(key=lambda slot: (found.start_s[slot], found.end_s[slot]))
        index = {slot: number for number, slot in enumerate(slots)}

        def task(slot: int) -> Task:
            what, cause = shown[slot], found.cause[slot]
            assert what.kind is not None
            while cause >= 0 and cause not in index:  # what waits alone is passed over
                cause = found.cause[cause]
            is_item = slot < len(self.items)
            return Task(
                what.kind,
                found.start_s[slot],
                found.end_s[slot],
                device=self.devices[slot] if is_item else None,
                channels=what.channels,
                action=what.action,
                size_bytes=what.size_bytes,
                cause=index.get(cause),
                ready_s=None if is_item else found.ready_s[slot],
            )

        return [task(slot) for slot in slots]

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.played.step_s

    @property
    def minibatch_s(self) -> float:
        """Seconds of a mini-batch; of several between which nothing drains their mean."""
        return self.step_s / self.program.num_minibatches

    @cached_property
    def device_memory(self) -> Mapping[int, Sequence[tuple[float, float]]]:
        """Device -> (seconds, bytes) whenever the memory in use changes.

        What stages hold all the time (``fixed_bytes``) is there from the start. A forward takes
        ``activation_bytes`` at its start, its backward gives them back at its end and uses
        ``working_bytes`` meanwhile; where nothing goes backward, the forward gives them back
        itself.
        """
        found = {}
        for device in range(len(self.program.actions)):
            in_use = sum(
                costs.fixed_bytes
                for costs, home in zip(self.costs.stages, self.program.devices)
                if home == device
            )
            found[device] = [(0.0, in_use)]
            for at_s, change in self._memory_changes(device):
                if change:
                    in_use += change
                    found[device].append((at_s, in_use))
        return found

    def _memory_changes(self, device: int) -> Iterator[tuple[float, float]]:
        """(seconds, bytes more or less) in the order of the device's line, which is time's."""
        for item in self.work.lines[device]:
            kind, action, *_ = self.items[item]
            is_compute = kind in (SpanKind.FORWARD, SpanKind.BACKWARD)
            if not is_compute or action is None or action.stage == FEED:
                continue
            costs, start_s = self.costs.stages[action.stage], self.played.start_s[item]
            end_s = start_s + self.work.seconds[item]
            kept, used = costs.activation_bytes, costs.working_bytes
            if action.kind is Kind.FORWARD:
                yield start_s, kept
                if not self.program.has_backward:
                    yield end_s, -kept
            else:
                yield start_s, used
                yield end_s, -used - kept


def critical_path(simulation: Simulation) -> list[PathStep]:
    """The chain of tasks that determines how long a simulated step takes.

    From the task that ends last one goes back from each task to the one whose end let it start.
    They follow one another without a gap, so their seconds add up to the step; to make the step
    shorter, one of them has to get shorter (or the order has to change).

    .. code-block:: text

        device 0   | F0 | F1 |         | B0 | B1 |        F0, its message, F0, B0, its message,
        device 1        --| F0 | B0 |--                   B0, B1
    """
    tasks, found = simulation.tasks, list[PathStep]()
    ends_s = [task.end_s for task in tasks]
    index: int | None = ends_s.index(max(ends_s)) if tasks else None
    while index is not None:
        end_s = found[-1].task.start_s if found else ends_s[index]
        found.append(PathStep(index, tasks[index], end_s))
        index = tasks[index].cause
    return found[::-1]


def simulate(program: Program, costs: ProgramCosts) -> Simulation:
    """When everything in a step happens.

    Args:
        program: what every device does.
        costs: what it costs; device ``d`` of the program is device ``d`` of its cluster.

    Raises:
        ScheduleError: devices wait for each other for ever; the text names them and where.

    >>> from lightning_gpp.cluster import Link, uniform_cluster
    >>> from lightning_gpp.graph import StageEdge, StageGraph
    >>> from lightning_gpp.schedule import build_program
    >>> from lightning_gpp.simulate.program_costs import MessageBytes, StageCosts
    >>> chain = StageGraph(2, (StageEdge(0, 1, ("h",)),))
    >>> program = build_program(chain, devices=[0, 1], num_microbatches=4)
    >>> size = {(0, 1): MessageBytes(per_unit=0.0)}
    >>> costs = ProgramCosts(
    ...     uniform_cluster(2, Link(10.0)), (StageCosts(1.0, 2.0),) * 2, size, size
    ... )
    >>> simulate(program, costs).step_s  # (4 micro-batches + 2 stages - 1) (1 + 2) seconds
    15.0
    """
    return Simulation(program, costs)
