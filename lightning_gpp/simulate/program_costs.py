"""The costs of a program's actions on a cluster, for simulation and emulation.

Compute is given for every stage of the program (a replica) and its own micro-batch, messages by
the units that they carry. The same costs are simulated (:func:`.simulate`) and
emulated (:mod:`lightning_gpp.emulation`), so that both speak of the same step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightning_gpp.cluster import Cluster, Link, channels
from lightning_gpp.graph import FEED
from lightning_gpp.schedule import Action, Kind, Program


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Costs of one stage of a program, for one of its micro-batches.

    Attributes:
        forward_s: seconds of the forward; on the stage of the loss with the user's own step, where
            that runs for every micro-batch.
        backward_s: seconds of the backward; with recomputation the second forward included.
        fixed_bytes: parameters, their gradients and the optimizer's state.
        activation_bytes: bytes kept from the start of a forward to the end of its backward.
        working_bytes: bytes used beside them while a backward runs (recomputed activations).
    """

    forward_s: float
    backward_s: float
    fixed_bytes: float = 0.0
    activation_bytes: float = 0.0
    working_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class MessageBytes:
    """Size of an edge's messages in one direction.

    Attributes:
        per_unit: bytes per unit (smallest micro-batch) that a message carries.
        fixed: bytes that every message has besides.
    """

    per_unit: float
    fixed: float = 0.0

    def of(self, num_units: int) -> float:
        """Bytes of a message."""
        return self.fixed + self.per_unit * num_units


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are all-reduced together.

    Attributes:
        group: index of the reduce group of the program.
        size_bytes: bytes of the gradients.
        ready_fraction: part of a device's last backward after which they are final, from 0 to 1.
    """

    group: int
    size_bytes: float
    ready_fraction: float = 1.0


@dataclass(frozen=True, slots=True)
class Overhead:
    """Processor time that a device spends on a message, besides the transfer.

    Attributes:
        fixed_s: per message.
        per_byte_s: per byte.
    """

    fixed_s: float = 0.0
    per_byte_s: float = 0.0

    def seconds(self, size_bytes: float) -> float:
        """Seconds for one message."""
        return self.fixed_s + self.per_byte_s * size_bytes


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of a step outside of the program's compute and messages.

    Attributes:
        data_s: seconds in which a mini-batch is read, and copied to the device of the feed.
        prepare_s: seconds from the read mini-batch to the program, on the device of the feed: the
            user's hooks, cutting it into micro-batches.
        feed_s: seconds of the user's step before the pipelined forward, per micro-batch.
        feed_backward_s: seconds of its backward, where a gradient flows back to it.
        loss_s: seconds of the user's step after the pipelined forward, per micro-batch of the
            stage of the loss, whose ``forward_s`` they are part of.
        loss_backward_s: seconds of its backward, part of that stage's ``backward_s``.
        turn_s: seconds between the last forward and the first backward on the device of the loss,
            where the user's step runs once per mini-batch: the step after the pipelined forward,
            the Trainer's hooks, telling the other ranks to go on. Not taken where a program has no
            such place (:attr:`~lightning_gpp.schedule.Program.has_turn`).
        finish_s: device -> seconds from the end of its part of the program, and of that of the
            device of the loss, which tells the others the result, to the optimizer's step.
        optimizer_s: device -> seconds of the optimizer's step.
        per_update: mini-batches after which there is one, where they overlap.
        send: what a send costs the sending device.
        receive: what a receive costs the receiving device once the message is there.
        reduce: what the sum of a group's gradients costs each of its devices once it is there.
        action_s: seconds between two actions of a device (the interpreter).
    """

    data_s: float = 0.0
    prepare_s: float = 0.0
    feed_s: float = 0.0
    feed_backward_s: float = 0.0
    loss_s: float = 0.0
    loss_backward_s: float = 0.0
    turn_s: float = 0.0
    finish_s: Mapping[int, float] = field(default_factory=dict)
    optimizer_s: Mapping[int, float] = field(default_factory=dict)
    per_update: int = 1
    send: Overhead = Overhead()
    receive: Overhead = Overhead()
    reduce: Overhead = Overhead()
    action_s: float = 0.0

    def of_part(self, part: float, num_devices: int) -> StepCosts:
        """With a part of the input, on devices that all take what the slowest takes."""
        optimizer_s, finish_s = (
            dict.fromkeys(range(num_devices), max(seconds.values())) if seconds else {}
            for seconds in (self.optimizer_s, self.finish_s)
        )
        data_s = self.data_s * part
        return replace(self, data_s=data_s, optimizer_s=optimizer_s, finish_s=finish_s)


@dataclass(frozen=True)
class ProgramCosts:
    """Costs of a program on a cluster.

    Attributes:
        cluster: device ``d`` of the program is its device ``d``; the links between them.
        stages: of every stage of the program.
        forward_bytes: edge (source, target) of the program -> its messages with activations.
        backward_bytes: edge (source, target) -> its messages with gradients, which go from target
            to source.
        buckets: in the order in which a device begins their sums.
        step: what comes besides.
        feeds_ahead: whether stages have their inputs when the program begins.
    """

    cluster: Cluster
    stages: tuple[StageCosts, ...]
    forward_bytes: Mapping[tuple[int, int], MessageBytes] = field(default_factory=dict)
    backward_bytes: Mapping[tuple[int, int], MessageBytes] = field(default_factory=dict)
    buckets: tuple[Bucket, ...] = ()
    step: StepCosts = StepCosts()
    feeds_ahead: bool = False


@dataclass(frozen=True, slots=True)
class MessageCosts:
    """Costs of the messages from one stage to another.

    Attributes:
        link: over which they go.
        size: their bytes.
        channels: what they occupy while they are on their way.
    """

    link: Link
    size: MessageBytes
    channels: tuple[str, ...]

    def transfer_s(self, num_units: int) -> float:
        """Seconds of a message that carries so many units."""
        return self.link.transfer_s(self.size.of(num_units))


def message_costs(
    program: Program, costs: ProgramCosts, source: int, target: int, *, is_gradient: bool
) -> MessageCosts:
    """Costs of the messages that one stage sends to another.

    Args:
        program: says where the stages are.
        costs: bytes and links.
        source: the stage that sends; the feed is one.
        target: the stage that receives.
        is_gradient: whether they are gradients, which go against the edge.
    """
    pair = (target, source) if is_gradient else (source, target)
    sizes = costs.backward_bytes if is_gradient else costs.forward_bytes
    ends = program.device(source), program.device(target)
    is_feed = source == FEED and not is_gradient
    return MessageCosts(
        costs.cluster.link(*ends), sizes[pair], channels(costs.cluster, *ends, is_feed=is_feed)
    )


def compute_s(costs: ProgramCosts, action: Action) -> float:
    """Seconds of a forward or a backward, also of the feed."""
    is_forward = action.kind is Kind.FORWARD
    if action.stage == FEED:
        return costs.step.feed_s if is_forward else costs.step.feed_backward_s
    stage = costs.stages[action.stage]
    return stage.forward_s if is_forward else stage.backward_s
