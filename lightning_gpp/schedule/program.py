"""A program: for every device the ordered list of its actions for one mini-batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from lightning_gpp.graph import FEED, StageEdge
from lightning_gpp.schedule.action import Action

FORMAT = "lightning_gpp.program"
VERSION = 1


@dataclass(frozen=True, slots=True)
class ReduceGroup:
    """Parameters that stages on several devices share: their gradients are summed.

    Attributes:
        parameters: canonical names.
        devices: the devices that hold them, ascending; the first one owns them.
    """

    parameters: tuple[str, ...]
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """What all devices do for one mini-batch.

    Attributes:
        schedule: name of the schedule it was made from.
        num_microbatches: smallest micro-batches in the mini-batch.
        devices: device of every stage. The last stage computes the loss; the feed is on its device.
        multiples: micro-batch size of every stage in units of the smallest micro-batch.
        edges: the edges of the stage graph.
        actions: for every device the actions in order.
        reduce_groups: what the REDUCE actions sum; their ``microbatch`` is the index here.
    """

    schedule: str
    num_microbatches: int
    devices: tuple[int, ...]
    multiples: tuple[int, ...]
    edges: tuple[StageEdge, ...]
    actions: tuple[tuple[Action, ...], ...]
    reduce_groups: tuple[ReduceGroup, ...] = ()

    def __str__(self) -> str:
        return "\n".join(
            f"device {device}: {' '.join(map(str, actions))}"
            for device, actions in enumerate(self.actions)
        )

    @property
    def num_stages(self) -> int:
        """Number of stages, the feed not counted."""
        return len(self.devices)

    @property
    def loss_stage(self) -> int:
        """The stage that computes the loss: the last one."""
        return len(self.devices) - 1

    @property
    def has_backward(self) -> bool:
        """Whether it trains."""
        return self.schedule != "forward"

    @cached_property
    def out_edges(self) -> dict[int, tuple[StageEdge, ...]]:
        """Stage (or feed) -> edges that leave it."""
        return {
            stage: tuple(edge for edge in self.edges if edge.source == stage)
            for stage in range(FEED, self.num_stages)
        }

    @cached_property
    def in_edges(self) -> dict[int, tuple[StageEdge, ...]]:
        """Stage (or feed) -> edges that enter it."""
        return {
            stage: tuple(edge for edge in self.edges if edge.target == stage)
            for stage in range(FEED, self.num_stages)
        }

    def device(self, stage: int) -> int:
        """Device of a stage; the feed is where the loss is."""
        return self.devices[self.loss_stage if stage == FEED else stage]

    def multiple(self, stage: int) -> int:
        """Units of a stage's micro-batch; the feed goes at the pace of the loss."""
        return self.multiples[self.loss_stage if stage == FEED else stage]

    def stage_microbatches(self, stage: int) -> int:
        """How many micro-batches of its own size a stage processes."""
        return self.num_microbatches // self.multiple(stage)

    def is_local(self, edge: StageEdge) -> bool:
        """Whether both ends are on one device, so that no message is needed."""
        return self.device(edge.source) == self.device(edge.target)

    def message_units(self, edge: StageEdge) -> int:
        """Units in one message: the smaller of the two micro-batches."""
        return min(self.multiple(edge.source), self.multiple(edge.target))

    def message_range(self, edge: StageEdge, stage: int, microbatch: int) -> range:
        """Indices of the messages on ``edge`` that belong to one micro-batch of ``stage``."""
        count = self.multiple(stage) // self.message_units(edge)
        return range(microbatch * count, (microbatch + 1) * count)

    def compute_actions(self) -> Iterator[Action]:
        """All forwards and backwards."""
        return (a for actions in self.actions for a in actions if a.kind.is_compute)

    def to_json(self) -> str:
        """The versioned JSON form."""
        data = asdict(self) | {
            "format": FORMAT,
            "version": VERSION,
            "actions": [[str(action) for action in actions] for actions in self.actions],
        }
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Program:
        """Reads :meth:`to_json`'s form.

        Raises:
            ValueError: it is not a program, or one of another version.
        """
        data: dict[str, Any] = json.loads(text)
        form = (data.pop("format", None), data.pop("version", None))
        if form != (FORMAT, VERSION):
            raise ValueError(
                f"expected {FORMAT} version {VERSION}, got {form[0]} version {form[1]}"
            )
        return cls(
            schedule=data["schedule"],
            num_microbatches=data["num_microbatches"],
            devices=tuple(data["devices"]),
            multiples=tuple(data["multiples"]),
            edges=tuple(
                StageEdge(**(edge | {"values": tuple(edge["values"])})) for edge in data["edges"]
            ),
            actions=tuple(tuple(map(Action.parse, row)) for row in data["actions"]),
            reduce_groups=tuple(
                ReduceGroup(tuple(group["parameters"]), tuple(group["devices"]))
                for group in data["reduce_groups"]
            ),
        )
