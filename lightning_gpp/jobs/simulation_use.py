"""What a simulated step is made of: seconds of devices and channels, and of the critical path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from lightning_gpp.simulate.simulation import Simulation, Task, TaskKind

GROUPS: Mapping[TaskKind, str] = MappingProxyType(
    {
        TaskKind.FORWARD: "forward",
        TaskKind.BACKWARD: "backward",
        TaskKind.FEED: "your step",
        TaskKind.TRANSFER: "messages",
        TaskKind.REDUCE: "sums of gradients",
        TaskKind.DATA: "input",
        TaskKind.COPY: "input",
        TaskKind.PREPARE: "input",
        TaskKind.SEND: "sending and receiving",
        TaskKind.RECEIVE: "sending and receiving",
        TaskKind.OVERHEAD: "sending and receiving",
        TaskKind.FINISH: "optimizer",
        TaskKind.OPTIMIZER: "optimizer",
    }
)
"""What people call a kind of task; several kinds share a name."""

COMPUTE = ("forward", "backward", "your step")


@dataclass(frozen=True, slots=True)
class ChannelUse:
    """What a channel carries in a step.

    Attributes:
        name: of the channel.
        busy_s: seconds in which something is on it.
        num_transfers: messages and sums.
        size_bytes: of them.
    """

    name: str
    busy_s: float
    num_transfers: int
    size_bytes: float


@dataclass(frozen=True)
class StepUse:
    """The last of the simulated steps.

    Attributes:
        step_s: its seconds.
        devices: device -> name of a group -> seconds that the device itself spends on it.
        channels: the busiest first.
        path_s: name of a group -> seconds of the critical path; what is left waits.
        transfer_s: name of a group -> seconds on the way, all transfers added up.
        peak_bytes: device -> most memory in use.
    """

    step_s: float
    devices: Mapping[int, Mapping[str, float]]
    channels: Sequence[ChannelUse]
    path_s: Mapping[str, float]
    transfer_s: Mapping[str, float]
    peak_bytes: Mapping[int, float]

    def compute_s(self, device: int) -> float:
        """Seconds in which a device computes."""
        return sum(self.devices[device].get(group, 0.0) for group in COMPUTE)

    @property
    def bubble_fraction(self) -> float:
        """Part of the device-seconds of the step in which no device computes."""
        busy_s = sum(self.compute_s(device) for device in self.devices)
        return 1 - busy_s / (self.step_s * len(self.devices)) if self.step_s else 0.0


def step_use(simulation: Simulation) -> StepUse:
    """Adds up the tasks of the last step."""
    tasks = simulation.tasks
    last = max((task.step for task in tasks), default=0)
    devices: dict[int, defaultdict[str, float]] = {
        device: defaultdict(float) for device in range(len(simulation.program.actions))
    }
    transfer_s: defaultdict[str, float] = defaultdict(float)
    carried: defaultdict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        if task.step != last:
            continue
        group = GROUPS[task.kind]
        if task.device is not None:
            devices[task.device][group] += task.duration_s
        else:
            transfer_s[group] += task.duration_s
        for channel in task.channels:
            carried[channel].append(task)
    uses = (_use(name, tasks) for name, tasks in carried.items())
    return StepUse(
        simulation.step_s,
        devices,
        sorted(uses, key=lambda use: use.busy_s, reverse=True),
        critical_path_s(simulation),
        transfer_s,
        {d: max(size for _, size in simulation.device_memory[d]) for d in devices},
    )


def _use(name: str, tasks: Sequence[Task]) -> ChannelUse:
    return ChannelUse(
        name,
        sum(task.duration_s for task in tasks),
        len(tasks),
        sum(task.size_bytes or 0.0 for task in tasks),
    )


def critical_path_s(simulation: Simulation) -> dict[str, float]:
    """Name of a group -> seconds for which it holds up the end of the last step."""
    tasks = simulation.tasks
    until_s = max((task.end_s for task in tasks), default=0.0)
    begin_s = until_s - simulation.step_s
    index = max(range(len(tasks)), key=lambda i: tasks[i].end_s, default=None)
    seconds: defaultdict[str, float] = defaultdict(float)
    while index is not None and until_s > begin_s:
        task = tasks[index]
        start_s = max(task.start_s, begin_s)
        seconds[GROUPS[task.kind]] += max(0.0, min(task.end_s, until_s) - start_s)
        until_s, index = min(until_s, start_s), task.cause
    return dict(seconds)
