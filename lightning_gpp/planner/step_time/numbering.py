"""Numbers for all forwards and backwards of a step."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_gpp.graph import FEED, StageEdge
from lightning_gpp.planner.plan.plan_graph import PlanGraph
from lightning_gpp.planner.step_time.shares import EdgeMessages, Share, messages
from lightning_gpp.schedule import Schedule, Steps


class Numbering:
    """Numbers the forwards and backwards of a step.

    The work of a replica is numbered on: its forwards, and then its backwards. Last are the
    backwards of the feed, and its forwards: one for each of mini-batches that overlap, otherwise
    one for all.

    Args:
        graph: the stages.
        num_microbatches: smallest micro-batches of the mini-batch.
        steps: forwards and backwards of every stage in order.
        order: of the schedule.

    Attributes:
        shares: how the replicas of every stage take the mini-batch.
        first: number of the first forward of every stage; then that of the feed's backwards.
        num_feed_backwards: how many of them there are.
        num_feed_forwards: likewise.
    """

    def __init__(
        self,
        graph: PlanGraph,
        num_microbatches: int,
        steps: Mapping[int, Steps],
        *,
        order: Schedule,
    ) -> None:
        self.graph, self.num_microbatches, self.steps = graph, num_microbatches, steps
        self.order, self.has_halves = order, order.forwards_first
        self.shares = [
            Share(units, num_microbatches // multiple)
            for multiple, units in zip(graph.multiples, graph.shares)
        ]
        self.first = [0]
        for share in self.shares:
            self.first.append(self.first[-1] + 2 * share.num_replicas * share.num_microbatches)
        edges = graph.stages.edges
        has_feed_backward = any(e.source == FEED and e.has_backward for e in edges)
        self.num_feed_backwards = num_microbatches // graph.multiples[FEED] * has_feed_backward
        self.num_feed_forwards = 1 if order.flushes else num_microbatches

    @property
    def first_feed(self) -> int:
        """The number of the feed's first forward."""
        return self.first[-1] + self.num_feed_backwards

    def edge_messages(self, edge: StageEdge) -> tuple[EdgeMessages, EdgeMessages]:
        """The messages of an edge, there and back; the feed goes at the pace of the loss."""
        source = self.shares[edge.source]
        if edge.source == FEED:
            pace = self.graph.multiples[FEED]
            source = Share((pace,), self.num_microbatches // pace)
        return messages(source, self.shares[edge.target])
