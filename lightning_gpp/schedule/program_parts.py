"""What actions of a program refer to: replicas, parts of messages, all-reduces."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpp.graph import FEED


@dataclass(frozen=True, slots=True)
class ReduceGroup:
    """Parameters that several devices hold, so that their gradients are all-reduced.

    Attributes:
        parameters: canonical names.
        devices: the devices that hold them, ascending; the first one owns them.
        stage: the stage of the plan whose replicas hold them; None where different stages share
            the parameters.
    """

    parameters: tuple[str, ...]
    devices: tuple[int, ...]
    stage: int | None = None


@dataclass(frozen=True, slots=True)
class Replica:
    """The stage of the plan, and the replica, that a stage of a program is.

    Attributes:
        stage: id of the stage in the plan's stage graph.
        index: which of its replicas, from 0.
        count: how many there are.
    """

    stage: int
    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        if self.stage == FEED:
            return "the feed"
        if self.count == 1:
            return f"stage {self.stage}"
        return f"stage {self.stage}, replica {self.index} of {self.count}"


@dataclass(frozen=True, slots=True)
class Part:
    """The units that one message carries: the overlap of two micro-batches.

    Attributes:
        source_microbatch: the micro-batch of the stage that sends it (forward).
        target_microbatch: the micro-batch of the stage that receives it.
        start: first unit of the mini-batch in it.
        stop: first unit after it.
    """

    source_microbatch: int
    target_microbatch: int
    start: int
    stop: int

    @property
    def num_units(self) -> int:
        """Number of units in the message."""
        return self.stop - self.start
