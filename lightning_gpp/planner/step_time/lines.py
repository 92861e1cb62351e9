"""The work of a step by numbers: who computes what in which order, and what replicas hand over.

Devices that hold several stages have the orders of :mod:`lightning_gpp.schedule.merge`, made from
the numbers without making a program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from lightning_gpp.graph import FEED, StageEdge
from lightning_gpp.planner.plan.plan_graph import PlanGraph
from lightning_gpp.schedule import Schedule, Steps
from lightning_gpp.schedule.merge import StageQueue, merge_queues, num_ahead, turn
from lightning_gpp.schedule.path_lengths import PathLengths, path_lengths


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


def merged_lines(work: Numbering, num_devices: int) -> list[list[int]]:
    """The orders of devices with several stages, or with the feed, as programs merge them."""
    graph, queues = work.graph, []
    for stage, share in enumerate(work.shares):
        start, steps = 0, work.steps[stage]
        for replica, (device, units) in enumerate(zip(graph.devices[stage], share.units)):
            first = work.first[stage] + replica * 2 * share.num_microbatches
            taken = share.num_microbatches, units, share.num_units
            queues.append(StageQueue(device, steps, first, *taken, start))
            start += units
    pace, count = graph.multiples[FEED], work.num_feed_backwards
    first = work.first[-1] - count  # its forwards have no number
    back = tuple(range(-1, -count - 1, -1))
    feed = StageQueue(graph.devices[FEED][0], back, first, count, pace, pace)
    return merge_queues(
        [*queues, feed],
        _needs(work),
        replica_paths(work) if work.has_halves else None,
        num_devices=num_devices,
        num_works=work.first[-1] + count,
    )


def endless_lines(work: Numbering, num_devices: int) -> list[list[int]]:
    """The orders of devices where the pipeline does not drain and stages have no replicas."""
    turns: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in range(num_devices)]
    ahead = [num_ahead([step >= 0 for step in work.steps[s]]) for s in range(len(work.shares))]
    for stage, share in enumerate(work.shares):
        first, device = work.first[stage], work.graph.devices[stage][0]
        for step in work.steps[stage]:
            number = first + (step if step >= 0 else share.num_microbatches + ~step)
            its_turn = turn(stage, max(step, ~step), ahead[stage], is_forward=step >= 0)
            turns[device].append((its_turn, number))
    fed = [ahead[edge.target] for edge in work.graph.stages.edges if edge.source == FEED]
    for microbatch in range(work.num_feed_forwards):
        its_turn = turn(FEED, microbatch, max(fed, default=0), is_forward=True)
        turns[work.graph.devices[FEED][0]].append((its_turn, work.first_feed + microbatch))
    return [[number for _, number in sorted(line)] for line in turns]


def _needs(work: Numbering) -> Iterator[tuple[int, int]]:
    """Pairs of work of which the first needs the second; no messages of the feed."""
    counts = [share.num_microbatches for share in work.shares]
    for edge in work.graph.stages.edges:
        there, back = work.edge_messages(edge)
        target = work.first[edge.target]
        if edge.source != FEED:
            source = work.first[edge.source]
            for sender, receiver, _ in there.each:
                yield target + receiver, source + sender
            source += counts[edge.source]
        else:
            source = work.first[-1]
        if edge.has_backward:
            target += counts[edge.target]
            for sender, receiver, _ in back.each:
                yield source + receiver, target + sender


def replica_paths(work: Numbering) -> PathLengths:
    """The longest paths through the replicas of all stages."""
    first = list(accumulate((share.num_replicas for share in work.shares), initial=0))
    edges = [
        StageEdge(first[edge.source] + i, first[edge.target] + j, (), edge.has_backward)
        for edge in work.graph.stages.edges
        if edge.source != FEED
        for i, j in {kind.pair for kind in work.edge_messages(edge)[0].kinds}
    ]
    return path_lengths([units for share in work.shares for units in share.units], edges)


class Share(NamedTuple):
    """How the replicas of a stage take a mini-batch.

    Attributes:
        units: smallest micro-batches in the micro-batch of each replica.
        num_microbatches: of each.
    """

    units: tuple[int, ...]
    num_microbatches: int

    @property
    def num_replicas(self) -> int:
        """Replicas of the stage."""
        return len(self.units)

    @property
    def num_units(self) -> int:
        """Smallest micro-batches in one of the stage, all replicas together."""
        return sum(self.units)

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """(end, number, replica) of every micro-batch of every replica, in the order of units."""
        end = 0
        for microbatch in range(self.num_microbatches):
            for replica, units in enumerate(self.units):
                end += units
                yield end, replica * 2 * self.num_microbatches + microbatch, replica


class MessageKind(NamedTuple):
    """What messages have in common that take as long.

    Attributes:
        pair: the replicas that send and receive.
        num_units: smallest micro-batches that a message carries.
    """

    pair: tuple[int, int]
    num_units: int


class EdgeMessages(NamedTuple):
    """The messages of an edge in one direction, each what two micro-batches have in common.

    Attributes:
        kinds: those that occur.
        counts: how many there are of each kind.
        each: of every message the sender's micro-batch, the receiver's (counted on over their
            replicas) and the number of its kind, in the order in which every replica sends them.
    """

    kinds: tuple[MessageKind, ...]
    counts: tuple[int, ...]
    each: tuple[tuple[int, int, int], ...]


@lru_cache(maxsize=4096)  # many plans have stages of the same shape
def messages(source: Share, target: Share) -> tuple[EdgeMessages, EdgeMessages]:
    """The messages of an edge: there, and back."""
    found: list[tuple[int, int, int, int, int]] = []
    senders, receivers = source.pieces(), target.pieces()
    unit = sent = received = 0
    while unit < source.num_units * source.num_microbatches:
        if sent == unit:
            sent, sender, i = next(senders)
        if received == unit:
            received, receiver, j = next(receivers)
        stop = min(sent, received)
        found.append((sender, receiver, i, j, stop - unit))
        unit = stop
    back = [(receiver, sender, j, i, units) for sender, receiver, i, j, units in found]
    return _as_sent(found), _as_sent(back)


def _as_sent(found: list[tuple[int, int, int, int, int]]) -> EdgeMessages:
    """For every micro-batch those to the first replica first."""
    kinds: dict[MessageKind, int] = {}
    counts: list[int] = []
    each = []
    for sender, receiver, i, j, units in sorted(found, key=itemgetter(0, 3)):
        kind = kinds.setdefault(MessageKind((i, j), units), len(kinds))
        if kind == len(counts):
            counts.append(0)
        counts[kind] += 1
        each.append((sender, receiver, kind))
    return EdgeMessages(tuple(kinds), tuple(counts), tuple(each))
