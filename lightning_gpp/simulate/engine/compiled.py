"""A program and its costs as arrays of numbers, which can be played fast.

A *stream* is a device, or the host where it reads input ahead. Its operations follow one another:

- ``WORK``: takes ``seconds``; ``FINAL`` likewise, and makes gradients final in it;
- ``SEND``: asks for a transfer and goes on; ``RECEIVE``: waits for the end of one;
- ``MEET_SEND``, ``MEET_RECEIVE``: the same as a rendezvous, in which both wait for the end;
- ``REDUCE``: waits for the sums of a reduce group.

A *transfer* is a message or the sum of a bucket: it occupies its channels for its seconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_gpp.simulate.simulation import TaskKind

WORK, FINAL, SEND, RECEIVE, MEET_SEND, MEET_RECEIVE, REDUCE = range(7)

KINDS = tuple(TaskKind)
"""Tasks are stored by the position of their kind."""

KIND_NUMBER = {kind: number for number, kind in enumerate(KINDS)}

NO_TASK = len(KINDS)
"""Instead of a kind: nothing to show (a token between streams)."""


@dataclass(slots=True)
class Operations:
    """The operations of all streams, one stream after the other.

    Attributes:
        first: of every stream its first operation; one more at the end.
        codes: what each does.
        arguments: transfer of a send or receive; reduce group of a REDUCE.
        seconds: of ``WORK`` and ``FINAL``.
        kinds: position in :data:`KINDS` of the task that it is.
        actions: position of its action on its device; -1 for none.
    """

    first: list[int] = field(default_factory=lambda: [0])
    codes: bytearray = field(default_factory=bytearray)
    arguments: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    kinds: bytearray = field(default_factory=bytearray)
    actions: list[int] = field(default_factory=list)

    def add(
        self, code: int, argument: int, seconds: float, kind: int = NO_TASK, action: int = -1
    ) -> None:
        """Appends an operation to the stream that is being made."""
        self.codes.append(code)
        self.arguments.append(argument)
        self.seconds.append(seconds)
        self.kinds.append(kind)
        self.actions.append(action)

    def end_stream(self) -> None:
        """What is appended from now on is of the next stream."""
        self.first.append(len(self.codes))


@dataclass(slots=True)
class Transfers:
    """Messages, and after them sums.

    Attributes:
        seconds: how long each takes.
        size_bytes: what it moves.
        channels: what it occupies.
        kinds: position in :data:`KINDS` of the task that it is.
        senders: the operation that asks for it; of a sum the REDUCE of its first device;
            -1 for none.
    """

    seconds: list[float] = field(default_factory=list)
    size_bytes: list[float] = field(default_factory=list)
    channels: list[tuple[int, ...]] = field(default_factory=list)
    kinds: bytearray = field(default_factory=bytearray)
    senders: list[int] = field(default_factory=list)

    def add(self, seconds: float, size_bytes: float, channels: tuple[int, ...], kind: int) -> int:
        """Appends one; returns its number."""
        self.seconds.append(seconds)
        self.size_bytes.append(size_bytes)
        self.channels.append(channels)
        self.kinds.append(kind)
        self.senders.append(-1)
        return len(self.seconds) - 1


@dataclass(frozen=True, slots=True)
class BucketSum:
    """The sum of a bucket.

    Attributes:
        transfer: its number among the transfers.
        group: number of the REDUCE actions that wait for it.
        minibatch: whose gradients.
        num_devices: how many devices take part.
        ready_fraction: part of the last backward after which its gradients are final.
    """

    transfer: int
    group: int
    minibatch: int
    num_devices: int
    ready_fraction: float


@dataclass(frozen=True)
class Compiled:
    """What :func:`lightning_gpp.simulate.engine.events.play` plays.

    Attributes:
        num_devices: the first so many streams are devices.
        operations: of all streams.
        transfers: all messages and sums of one step.
        channels: names of the channels.
        sums: in the order in which devices begin them.
        sums_of_device: of every device the positions in ``sums`` of those that it takes part in.
        final_groups: operation ``FINAL`` -> the sums (numbered as their REDUCE) final in it.
    """

    num_devices: int
    operations: Operations
    transfers: Transfers
    channels: tuple[str, ...]
    sums: tuple[BucketSum, ...]
    sums_of_device: Sequence[Sequence[int]]
    final_groups: dict[int, tuple[int, ...]]

    @property
    def num_streams(self) -> int:
        """Devices, and the host where it reads ahead."""
        return len(self.operations.first) - 1

    def stream(self, operation: int) -> int:
        """The stream that an operation belongs to."""
        return bisect_right(self.operations.first, operation) - 1
