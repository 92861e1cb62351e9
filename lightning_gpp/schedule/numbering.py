"""The work of a step as numbers: order of compute, and messages between replicas.

Programs and judged plans are both made of it. A stage on several devices is divided into replicas
that take consecutive shares of its units (GraphPipe, arXiv 2406.17145, section 4: data parallelism
inside of a stage). Orders and in-flight counts are those of the whole stage; every replica follows
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.schedule.action import Action, Kind
from lightning_gpp.schedule.merge import Needs, PathLengths, StageQueue, merge_queues, path_lengths
from lightning_gpp.schedule.schedules import Schedule, Steps


class Numbering:
    """Numbers the forwards and backwards of a step.

    The work of a replica is numbered on: its forwards, and then its backwards. Last are the
    backwards of the feed, and its forwards.

    Args:
        stages: the stage graph.
        devices: of the replicas of every stage.
        units: smallest micro-batches that each replica of every stage takes at a time.
        num_microbatches: smallest micro-batches of the mini-batch.
        order: of the schedule.
        order_pace: which of several works a shared device does first; see :mod:`.merge`.

    Attributes:
        shares: how the replicas of every stage take the mini-batch.
        kept: the replicas of every stage that are numbered.
        begin: number of the first forward of every replica; of the feed that of its backwards.
        pace: smallest micro-batches that the feed takes at a time: those of the loss.
        num_feed_backwards: how many of them there are.
        has_halves: whether all forwards come before all backwards.
    """

    def __init__(
        self,
        stages: StageGraph,
        devices: Sequence[tuple[int, ...]],
        units: Sequence[tuple[int, ...]],
        num_microbatches: int,
        order: Schedule,
        order_pace: float | None = None,
    ) -> None:
        self.stages, self.devices = stages, devices
        self.num_microbatches, self.order = num_microbatches, order
        self.has_halves, self.order_pace = order.forwards_first, order_pace
        self.shares = [Share(own, num_microbatches // sum(own)) for own in units]
        self.keep([range(len(own)) for own in units])
        self.pace = self.shares[-1].num_units
        goes_back = any(e.source == FEED and e.has_backward for e in stages.edges)
        goes_back = goes_back and order.has_backward
        self.num_feed_backwards = num_microbatches // self.pace * goes_back

    def keep(self, kept: Sequence[Sequence[int]]) -> None:
        """Numbers these replicas of every stage, and leaves out the others."""
        self.kept, self.begin, number = kept, dict[tuple[int, int], int](), 0
        for stage, own in enumerate(kept):
            for replica in own:
                self.begin[stage, replica] = number
                number += 2 * self.shares[stage].num_microbatches
        self.begin[FEED, 0] = number

    @cached_property
    def steps(self) -> Mapping[int, Steps]:
        """Forwards and backwards of every stage in order."""
        sizes = [share.num_units for share in self.shares]
        return self.order.steps(self.stages, self.num_microbatches, sizes)

    @property
    def first_feed(self) -> int:
        """The number of the feed's first forward."""
        return self.begin[FEED, 0] + self.num_feed_backwards

    def actions(self) -> list[Action]:
        """What every number is in a program, whose stages are replicas."""
        found, stage = list[Action](), 0
        for share in self.shares:
            for _ in share.units:
                for kind in (Kind.FORWARD, Kind.BACKWARD):
                    found += [Action(stage, kind, m) for m in range(share.num_microbatches)]
                stage += 1
        found += [Action(FEED, Kind.BACKWARD, m) for m in range(self.num_feed_backwards)]
        count = self.num_microbatches // self.pace
        return [*found, *(Action(FEED, Kind.FORWARD, m) for m in range(count))]

    def edge_messages(self, edge: StageEdge) -> tuple[Exchanges, Exchanges]:
        """The messages of an edge, there and back; the feed goes at the pace of the loss."""
        source = self.shares[edge.source]
        if edge.source == FEED:
            source = Share((self.pace,), self.num_microbatches // self.pace)
        return messages(source, self.shares[edge.target])

    @cached_property
    def replica_edges(self) -> tuple[StageEdge, ...]:
        """The edges between replicas that have units in common, each of which is a stage."""
        numbers = {replica: number for number, replica in enumerate(self.begin)}
        numbers[FEED, 0] = FEED
        found = [
            replace(edge, source=numbers[source], target=numbers[target])
            for edge in self.stages.edges
            for one in self.edge_messages(edge)[0]
            if (source := (edge.source, one.sender)) in numbers
            and (target := (edge.target, one.receiver)) in numbers
        ]
        return tuple(sorted(found, key=lambda edge: (edge.source, edge.target)))

    @cached_property
    def replica_paths(self) -> PathLengths:
        """The longest paths through the replicas of all stages."""
        units = [s.units[replica] for own, s in zip(self.kept, self.shares) for replica in own]
        return path_lengths(units, self.replica_edges)

    def lines(self) -> list[list[int]]:
        """The order of every device, without the feed's forwards where these come first."""
        if not self.order.flushes:
            return self._endless()
        used = [device for home in self.devices for device in home]
        if len(set(used)) < len(used) or self.num_feed_backwards:
            return self._merged()
        lines: list[list[int]] = [[] for _ in range(self.num_devices)]
        for stage, home in enumerate(self.devices):
            for replica in self.kept[stage]:
                lines[home[replica]] = self.works(stage, replica)
        return lines

    @property
    def num_devices(self) -> int:
        """One more than the highest device."""
        return 1 + max(device for home in self.devices for device in home)

    def works(self, stage: int, replica: int) -> list[int]:
        """The numbers of the steps of a replica in order."""
        count, first = self.shares[stage].num_microbatches, self.begin[stage, replica]
        return [first + (step if step >= 0 else count + ~step) for step in self.steps[stage]]

    def _merged(self) -> list[list[int]]:
        """The orders of devices with several stages, or with the feed's backwards."""
        queues = []
        for stage, share in enumerate(self.shares):
            starts = [*accumulate(share.units, initial=0)]
            for replica in self.kept[stage]:
                taken = share.units[replica], share.num_units, starts[replica]
                how = self.steps[stage], self.works(stage, replica), *taken
                queues.append(StageQueue(self.devices[stage][replica], *how))
        count = self.num_feed_backwards
        back = tuple(range(-1, -count - 1, -1))
        numbers = list(range(self.begin[FEED, 0], self.first_feed))
        feed = StageQueue(self.devices[FEED][0], back, numbers, self.pace, self.pace)
        return merge_queues(
            [*queues, feed],
            _needs(self),
            self.replica_paths if self.has_halves else None,
            num_devices=self.num_devices,
            num_works=self.first_feed,
            pace=self.order_pace,
        )

    def _endless(self) -> list[list[int]]:
        """Where the pipeline does not drain a device's order is the same for every mini-batch.

        After the forwards that are ahead come the backwards, later stages first; the feed is as far
        ahead as whoever reads it. That runs to its end: what an action needs of others comes in an
        earlier turn, or before it in the order in which every device takes the actions of a turn.

        Raises:
            ValueError: stages have replicas, or take several micro-batches at a time.
        """
        if any(share.units != (1,) for share in self.shares):
            raise ValueError(
                f"the schedule {self.order.name!r} needs stages of one micro-batch size, without "
                f"replicas: got replicas with {[list(share.units) for share in self.shares]} units"
            )
        turns: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in range(self.num_devices)]
        ahead = [_num_ahead(self.steps[stage]) for stage in range(len(self.shares))]
        for stage, share in enumerate(self.shares):
            first = self.begin[stage, 0]
            for step in self.steps[stage]:
                number, turn = first + step, (max(0, step - ahead[stage]), 0, 1, step, stage)
                if step < 0:
                    number, turn = first + share.num_microbatches + ~step, (~step, 1, -stage, 0, 0)
                turns[self.devices[stage][0]].append((turn, number))
        fed = [ahead[edge.target] for edge in self.stages.edges if edge.source == FEED]
        most = max(fed, default=0)
        for microbatch in range(self.num_microbatches):
            turn = max(0, microbatch - most), 0, 0, microbatch, FEED
            turns[self.devices[FEED][0]].append((turn, self.first_feed + microbatch))
        return [[number for _, number in sorted(line)] for line in turns]


def _num_ahead(steps: Steps) -> int:
    """Forwards that a stage does before its first backward, but one."""
    return next(place for place, step in enumerate(steps) if step < 0) - 1


def _needs(work: Numbering) -> Iterator[Needs]:
    """Which work needs which; no messages of the feed."""
    begin = work.begin
    counts = [*(share.num_microbatches for share in work.shares), 0]  # the feed's are by themselves
    for edge in work.stages.edges:
        there, back = work.edge_messages(edge)
        ways = [(there, edge.source, edge.target, 0)] if edge.source != FEED else []
        if edge.has_backward and work.order.has_backward:
            ways.append((back, edge.target, edge.source, 1))
        for exchanges, source, target, half in ways:
            for one in exchanges:
                ends = (source, one.sender), (target, one.receiver)
                if ends[0] in begin and ends[1] in begin:
                    sender, receiver = (begin[end] + half * counts[end[0]] for end in ends)
                    yield sender, receiver, one.each


class Share(NamedTuple):
    """How the replicas of a stage divide a mini-batch.

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
        """(end, replica, number) of every micro-batch of every replica, in the order of units."""
        end = 0
        for microbatch in range(self.num_microbatches):
            for replica, units in enumerate(self.units):
                end += units
                yield end, replica, microbatch


Messages = tuple[tuple[int, int, int], ...]
"""The sender's micro-batch, the receiver's and the smallest ones that both have in common."""


class Exchange(NamedTuple):
    """The messages between two replicas, one for every overlap of their micro-batches.

    Attributes:
        sender: a replica.
        receiver: a replica of the other stage.
        each: the messages in the order in which they are sent; one object for all pairs of
            replicas of an edge that exchange the same.
        counts: how many messages there are of each size.
    """

    sender: int
    receiver: int
    each: Messages
    counts: Mapping[int, int]


Exchanges = tuple[Exchange, ...]
"""All messages of an edge in one direction: those of the first replica first, to the first one."""


@lru_cache(maxsize=4096)  # many plans have stages of the same shape
def messages(source: Share, target: Share) -> tuple[Exchanges, Exchanges]:
    """The messages of an edge: there, and back."""
    there: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    back: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    senders, receivers = source.pieces(), target.pieces()
    unit = sent = received = 0
    while unit < source.num_units * source.num_microbatches:
        if sent == unit:
            sent, i, own = next(senders)
        if received == unit:
            received, j, other = next(receivers)
        stop = min(sent, received)
        there.setdefault((i, j), []).append((own, other, stop - unit))
        back.setdefault((j, i), []).append((other, own, stop - unit))
        unit = stop
    return _exchanges(there), _exchanges(back)


def _exchanges(found: Mapping[tuple[int, int], list[tuple[int, int, int]]]) -> Exchanges:
    known: dict[Messages, tuple[Messages, Counter[int]]] = {}
    exchanges = []
    for pair, some in sorted(found.items()):
        each = tuple(some)
        if each not in known:
            known[each] = each, Counter(units for *_, units in each)
        exchanges.append(Exchange(*pair, *known[each]))
    return tuple(exchanges)
