"""How busy devices and channels of a simulated step are, and how full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Usage:
    """How busy everything is.

    Attributes:
        devices: every device of the program.
        channels: every channel that is used, the busiest first.
    """

    devices: tuple[DeviceUsage, ...]
    channels: tuple[ChannelUsage, ...]

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
