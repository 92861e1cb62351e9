"""How busy devices and channels of a simulated step are, how full, and what transfers cost them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lightning_gpp.schedule import Kind, Program
from lightning_gpp.simulate.simulation import Simulation
from lightning_gpp.simulate.task import Task, TaskKind

COMPUTE = (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.FEED, TaskKind.TURN)
"""What counts as compute; the rest of a step is bubble (as in ``simulate.shares``)."""


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """What a device does with the seconds of a simulation.

    Attributes:
        device: which.
        total_s: seconds of the simulation.
        compute_s: in forwards, backwards and the user's step.
        other_s: in its other tasks (data, optimizer, handing messages over, the interpreter).
        peak_bytes: memory at its fullest.
        limit_bytes: its memory; None where it is not known.
    """

    device: int
    total_s: float
    compute_s: float
    other_s: float
    peak_bytes: float
    limit_bytes: int | None

    @property
    def bubble_s(self) -> float:
        """Seconds in which it does not compute."""
        return self.total_s - self.compute_s


@dataclass(frozen=True, slots=True)
class ChannelUsage:
    """What goes over a channel.

    Attributes:
        name: of the channel.
        total_s: seconds of the simulation.
        busy_s: seconds in which it is occupied.
        size_bytes: bytes of everything that occupies it.
        waited_s: seconds that transfers over it waited for a channel, added up.
    """

    name: str
    total_s: float
    busy_s: float
    size_bytes: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class TransferUsage:
    """How much of a message or sum is hidden behind compute.

    Attributes:
        index: of the task in the simulation.
        kind: message or sum.
        duration_s: seconds on its way.
        hidden_s: of these, seconds in which its receiver does something meanwhile; of a sum the
            mean over its devices.
    """

    index: int
    kind: TaskKind
    duration_s: float
    hidden_s: float

    @property
    def exposed_s(self) -> float:
        """Seconds in which its receiver stands still."""
        return self.duration_s - self.hidden_s


@dataclass(frozen=True)
class Usage:
    """How busy everything is.

    Attributes:
        devices: every device of the program.
        channels: every channel that is used, the busiest first.
        transfers: every message and every sum in the order of their starts.
    """

    devices: tuple[DeviceUsage, ...]
    channels: tuple[ChannelUsage, ...]
    transfers: tuple[TransferUsage, ...]

    @property
    def bubble_share(self) -> float:
        """Part of all device-seconds in which no compute action runs."""
        total_s = sum(device.total_s for device in self.devices)
        return sum(device.bubble_s for device in self.devices) / total_s if total_s else 1.0


def usage(simulation: Simulation) -> Usage:
    """How busy devices and channels are over all simulated steps."""
    tasks = list(simulation.tasks)
    total_s = max((task.end_s for task in tasks), default=0.0)
    of_device: list[list[Task]] = [[] for _ in simulation.program.actions]
    for task in tasks:
        if task.device is not None:
            of_device[task.device].append(task)
    return Usage(
        tuple(_device(simulation, d, own, total_s) for d, own in enumerate(of_device)),
        _channels(tasks, total_s),
        tuple(_transfers(simulation.program, tasks, [_Busy(own) for own in of_device])),
    )


def _device(
    simulation: Simulation, device: int, tasks: Sequence[Task], total_s: float
) -> DeviceUsage:
    compute_s = sum(task.duration_s for task in tasks if task.kind in COMPUTE)
    return DeviceUsage(
        device,
        total_s,
        compute_s,
        sum(task.duration_s for task in tasks if task.kind not in COMPUTE),
        max(size for _, size in simulation.device_memory[device]),
        simulation.costs.cluster.devices[device].memory_bytes,
    )


def _channels(tasks: Sequence[Task], total_s: float) -> tuple[ChannelUsage, ...]:
    found: dict[str, list[float]] = {}
    for task in tasks:
        waited_s = 0.0 if task.ready_s is None else task.start_s - task.ready_s
        for name in task.channels:
            sums = found.setdefault(name, [0.0, 0.0, 0.0])
            for place, value in enumerate((task.duration_s, task.size_bytes or 0.0, waited_s)):
                sums[place] += value
    channels = [ChannelUsage(name, total_s, *sums) for name, sums in found.items()]
    return tuple(sorted(channels, key=lambda channel: -channel.busy_s))


def _transfers(
    program: Program, tasks: Sequence[Task], busy: Sequence[_Busy]
) -> Iterator[TransferUsage]:
    for index, task in enumerate(tasks):
        action = task.action
        if task.device is not None or task.kind not in (TaskKind.TRANSFER, TaskKind.REDUCE):
            continue
        receivers: tuple[int, ...] = ()
        if action is not None and action.kind is Kind.REDUCE:
            receivers = program.reduce_group(action.microbatch).devices
        elif action is not None and action.peer is not None:
            receivers = (program.device(action.peer),)
        hidden_s = sum(busy[d].between(task.start_s, task.end_s) for d in receivers)
        mean_s = hidden_s / len(receivers) if receivers else 0.0
        yield TransferUsage(index, task.kind, task.duration_s, mean_s)


class _Busy:
    """Seconds in which a device does something, between any two points of time."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._starts = [task.start_s for task in tasks]
        self._ends = [task.end_s for task in tasks]
        self._before = [0.0, *accumulate(task.duration_s for task in tasks)]

    def between(self, start_s: float, end_s: float) -> float:
        """Seconds of its tasks, which do not overlap, from one point of time to another."""
        first = bisect_right(self._ends, start_s)
        stop = bisect_left(self._starts, end_s)
        if first >= stop:
            return 0.0
        before_s = max(0.0, start_s - self._starts[first])
        after_s = max(0.0, self._ends[stop - 1] - end_s)
        return self._before[stop] - self._before[first] - before_s - after_s
