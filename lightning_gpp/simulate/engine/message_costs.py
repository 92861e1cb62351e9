"""What a message of a program costs: bytes, seconds, channels.

One place for the simulation and the emulation of a program.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpp.cluster import Link, channels
from lightning_gpp.graph import FEED
from lightning_gpp.schedule import Action, Kind, Program
from lightning_gpp.simulate.program_costs import MessageBytes, ProgramCosts


@dataclass(frozen=True, slots=True)
class MessageCosts:
    """The messages from one stage to another.

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

    Raises:
        ValueError: the costs lack the edge.
    """
    pair = (target, source) if is_gradient else (source, target)
    sizes = costs.backward_bytes if is_gradient else costs.forward_bytes
    if pair not in sizes:
        name = "backward_bytes" if is_gradient else "forward_bytes"
        start = "the feed" if pair[0] == FEED else f"stage {pair[0]}"
        raise ValueError(f"{name} lacks the edge from {start} to stage {pair[1]}")
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


def check_costs(program: Program, costs: ProgramCosts) -> None:
    """Refuses costs of another program.

    Raises:
        ValueError: they know fewer devices or stages than the program has.
    """
    if len(program.actions) > costs.cluster.num_devices:
        raise ValueError(
            f"the program is for {len(program.actions)} devices, the cluster of the costs has "
            f"{costs.cluster.num_devices}"
        )
    if len(costs.stages) < program.num_stages:
        raise ValueError(
            f"there are no costs of stage {len(costs.stages)}: the program has "
            f"{program.num_stages} stages (replicas counted), the costs have {len(costs.stages)}"
        )
