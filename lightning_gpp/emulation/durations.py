"""How long everything takes that one device does in a program, from the costs of the program.

The rules are those of the simulator; only the moments at which things happen are the runtime's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_gpp.cluster import all_reduce_channels, all_reduce_s, channels
from lightning_gpp.runtime.transport.transport import Tag
from lightning_gpp.schedule import Action, Program, last_backward
from lightning_gpp.simulate.engine.message_costs import check_costs, compute_s, message_costs
from lightning_gpp.simulate.program_costs import Bucket, ProgramCosts


@dataclass(frozen=True, slots=True)
class Occupation:
    """A message, or a sum, on its way.

    Attributes:
        duration_s: how long it takes once its channels are free.
        channels: what it occupies.
        size_bytes: its size.
    """

    duration_s: float
    channels: tuple[str, ...]
    size_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceSum:
    """A sum that a device takes part in.

    Attributes:
        bucket: the gradients.
        final_in: the backward in which they become final; None where there is none.
        occupation: what the sum takes.
    """

    bucket: Bucket
    final_in: Action | None
    occupation: Occupation


@dataclass
class Durations:
    """Durations of one device's part of a program, in emulated seconds.

    Attributes:
        program: the program.
        costs: of the program on a cluster.
        device: which device.
        sums: its sums in the order in which it begins them.

    Raises:
        ValueError: the costs are not of this program.
    """

    program: Program
    costs: ProgramCosts
    device: int
    sums: Sequence[DeviceSum] = field(init=False)
    _messages: dict[tuple[int, int, bool, int], Occupation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_costs(self.program, self.costs)
        self.sums = tuple(
            self._device_sum(bucket, minibatch)
            for minibatch in range(self.program.num_minibatches)
            for bucket in self.costs.buckets
            if self.device in self.program.reduce_groups[bucket.group].devices
            and self.program.reduce_groups[bucket.group].stage is not None
        )

    def compute_s(self, action: Action) -> float:
        """Seconds of a forward or a backward."""
        return compute_s(self.costs, action)

    def message(self, message: Tag) -> Occupation:
        """A message between stages."""
        source, target, is_gradient, index = message
        pair = (target, source) if is_gradient else (source, target)
        num_units = self.program.parts[pair][index].num_units
        key = source, target, bool(is_gradient), num_units
        if key not in self._messages:
            costs = message_costs(
                self.program, self.costs, source, target, is_gradient=bool(is_gradient)
            )
            self._messages[key] = Occupation(
                costs.transfer_s(num_units), costs.channels, costs.size.of(num_units)
            )
        return self._messages[key]

    def shared_gradients(self, group: int, target: int) -> Occupation:
        """The gradients of parameters that different stages share, to the device ``target``."""
        size_bytes = self.group_bytes(group)
        if not size_bytes:
            return Occupation(0.0, ())
        cluster = self.costs.cluster
        seconds = cluster.link(self.device, target).transfer_s(size_bytes)
        return Occupation(seconds, channels(cluster, self.device, target), size_bytes)

    def group_bytes(self, number: int) -> float:
        """The gradients that the REDUCE actions of a number sum."""
        group = number % len(self.program.reduce_groups)
        return sum(bucket.size_bytes for bucket in self.costs.buckets if bucket.group == group)

    def update_s(self) -> float:
        """Seconds of the optimizer's step."""
        return self.costs.step.optimizer_s.get(self.device, 0.0)

    def _device_sum(self, bucket: Bucket, minibatch: int) -> DeviceSum:
        group = self.program.reduce_groups[bucket.group]
        assert group.stage is not None
        final_in = last_backward(self.program, self.device, group.stage, minibatch)
        cluster, algorithm = self.costs.cluster, self.costs.all_reduce
        seconds = all_reduce_s(cluster, group.devices, bucket.size_bytes, algorithm)
        found = all_reduce_channels(cluster, group.devices, algorithm)
        return DeviceSum(bucket, final_in, Occupation(seconds, found, bucket.size_bytes))
