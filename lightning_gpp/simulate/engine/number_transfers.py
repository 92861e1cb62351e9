"""The messages and sums of a program as numbered transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_gpp.cluster import all_reduce_channels, all_reduce_s, channels
from lightning_gpp.schedule import Action, Kind, Program, ScheduleError
from lightning_gpp.simulate.engine.compiled import KIND_NUMBER, NO_TASK, BucketSum, Transfers
from lightning_gpp.simulate.engine.message_costs import message_costs
from lightning_gpp.simulate.program_costs import ProgramCosts
from lightning_gpp.simulate.simulation import TaskKind

TRANSFER, SUM = KIND_NUMBER[TaskKind.TRANSFER], KIND_NUMBER[TaskKind.REDUCE]


@dataclass(slots=True)
class NumberedTransfers:
    """All transfers of a step, and how to find them.

    Attributes:
        program: whose they are.
        costs: what they cost.
        transfers: all of them.
        channel_numbers: channel -> its number.
        forward: edge -> number of its first message with activations, and how many there are.
        backward: the same of its messages with gradients.
        shared: (number of a sum, device) -> the messages to its owner and back, for parameters that
            different stages share (``Executor.reduce_shared`` in the runtime).
        sums: the buckets of replicated stages.
    """

    program: Program
    costs: ProgramCosts
    transfers: Transfers = field(default_factory=Transfers)
    channel_numbers: dict[str, int] = field(default_factory=dict)
    forward: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    backward: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    shared: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    sums: list[BucketSum] = field(default_factory=list)

    def __post_init__(self) -> None:
        for edge in self.program.edges:
            if not self.program.is_local(edge):
                pair = edge.source, edge.target
                self.forward[pair] = self._messages(*pair, is_gradient=False)
                if edge.has_backward and self.program.has_backward:
                    self.backward[pair] = self._messages(*pair, is_gradient=True)
        for number, minibatch, group in self.program.sums():
            if group.stage is None:
                index = number - minibatch * len(self.program.reduce_groups)
                sizes = [b.size_bytes for b in self.costs.buckets if b.group == index]
                self._shared_sum(number, group.devices, sum(sizes))
        for minibatch in range(self.program.num_minibatches):
            self._sums(minibatch)

    def number(self, action: Action) -> int:
        """The transfer that an action sends or receives.

        Raises:
            ScheduleError: the program has no such message.
        """
        kind, peer = action.kind, action.peer
        if kind is Kind.SEND_FORWARD:
            found = self.forward.get((action.stage, peer))  # type: ignore[arg-type]
        elif kind is Kind.RECEIVE_FORWARD:
            found = self.forward.get((peer, action.stage))  # type: ignore[arg-type]
        elif kind is Kind.SEND_BACKWARD:
            found = self.backward.get((peer, action.stage))  # type: ignore[arg-type]
        else:
            found = self.backward.get((action.stage, peer))  # type: ignore[arg-type]
        if found is None or action.microbatch >= found[1]:
            raise ScheduleError(f"{action} is of no message between two devices of the program")
        return found[0] + action.microbatch

    def token(self) -> int:
        """A message between the host and a device that takes no time and shows nothing."""
        return self.transfers.add(0.0, 0.0, (), NO_TASK)

    def sums_of_device(self) -> list[list[int]]:
        """Of every device the sums that it takes part in, in their order."""
        found: list[list[int]] = [[] for _ in self.program.actions]
        for number, bucket in enumerate(self.sums):
            for device in self.program.reduce_group(bucket.group).devices:
                found[device].append(number)
        return found

    def _messages(self, source: int, target: int, *, is_gradient: bool) -> tuple[int, int]:
        ends = (target, source) if is_gradient else (source, target)
        found = message_costs(self.program, self.costs, *ends, is_gradient=is_gradient)
        numbers = self._channels(found.channels)
        units = [part.num_units for part in self.program.parts[source, target]]
        sizes = {count: (found.transfer_s(count), found.size.of(count)) for count in set(units)}
        first = len(self.transfers.seconds)
        for count in units:
            self.transfers.add(*sizes[count], numbers, TRANSFER)
        return first, len(units)

    def _shared_sum(self, number: int, devices: Sequence[int], size_bytes: float) -> None:
        if not size_bytes:
            return
        for device in devices[1:]:
            up, down = (
                self.transfers.add(
                    self.costs.cluster.link(*ends).transfer_s(size_bytes),
                    size_bytes,
                    self._channels(channels(self.costs.cluster, *ends)),
                    SUM,
                )
                for ends in ((device, devices[0]), (devices[0], device))
            )
            self.shared[number, device] = up, down

    def _sums(self, minibatch: int) -> None:
        cluster, algorithm = self.costs.cluster, self.costs.all_reduce
        for bucket in self.costs.buckets:
            group = self.program.reduce_groups[bucket.group]
            if group.stage is None:
                continue
            seconds = all_reduce_s(cluster, group.devices, bucket.size_bytes, algorithm)
            names = all_reduce_channels(cluster, group.devices, algorithm)
            transfer = self.transfers.add(seconds, bucket.size_bytes, self._channels(names), SUM)
            self.sums.append(
                BucketSum(
                    transfer,
                    bucket.group + minibatch * len(self.program.reduce_groups),
                    minibatch,
                    len(group.devices),
                    bucket.ready_fraction,
                )
            )

    def _channels(self, names: Sequence[str]) -> tuple[int, ...]:
        numbers = self.channel_numbers
        return tuple(numbers.setdefault(name, len(numbers)) for name in names)
