"""A step of a plan as numbered work, replica by replica, ready to be played.

What :func:`lightning_gpp.schedule.build_program` makes of a plan, without its actions: replicas
take consecutive shares of every micro-batch, and two replicas exchange what their micro-batches
have in common. Where the last stage has replicas, the stage of the loss is on the device of the
first of them, which takes turns between both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from lightning_gpp.cluster import all_reduce_channels, channels
from lightning_gpp.engine.work import Send, Sum, Work
from lightning_gpp.graph import FEED, StageEdge
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan.plan_graph import PlanGraph
from lightning_gpp.planner.step_time.lines import (
    EdgeMessages,
    Numbering,
    endless_lines,
    merged_lines,
    replica_paths,
)
from lightning_gpp.schedule import Steps, reduce_groups

Buckets = Sequence[tuple[float, float]]
"""Of every sum: the part of the last backward before it, and its seconds."""

How = tuple[float, int, tuple[int, ...]]
"""Of a message: its seconds, its port, and the channels that it shares with others."""


class StepWork(Numbering):
    """Numbers the work of a step.

    Args:
        request: the links.
        graph: the stages.
        num_stages: those of the plan; one more is the stage of the loss.
        num_microbatches: smallest micro-batches of the mini-batch.
        steps: forwards and backwards of every stage in order.
    """

    def __init__(
        self,
        request: PlanRequest,
        graph: PlanGraph,
        num_stages: int,
        num_microbatches: int,
        steps: Mapping[int, Steps],
    ) -> None:
        super().__init__(graph, num_microbatches, steps, order=request.order)
        self.request, self.num_stages = request, num_stages
        self.numbers: dict[str, int] = {}
        self.messages_are_alone = request.cluster.has_private_channels
        self.sums_are_alone = False
        self.feed_port = 1 + max(device for home in graph.devices for device in home)

    def work(
        self, seconds: Sequence[Sequence[tuple[float, float]]], buckets: Sequence[Buckets]
    ) -> Work:
        """The work with what it takes.

        Args:
            seconds: of every stage of the plan, the forward and the backward of every replica.
            buckets: of every stage of the plan, the sums of its gradients.
        """
        durations: list[float] = []
        nothing = [[(0.0, 0.0)]] * (len(self.shares) - len(seconds))  # the loss
        for share, replicas in zip(self.shares, [*seconds, *nothing], strict=True):
            count = share.num_microbatches
            for forward_s, backward_s in replicas:
                durations += [forward_s] * count + [backward_s] * count
        durations += [0.0] * (self.num_feed_backwards + self.num_feed_forwards)
        missing = [0] * len(durations)
        work = Work(durations, missing, [()] * len(durations), self.lines())
        work.num_ports = self.feed_port + 1 + len(buckets)
        feeds = self.forwards(work)
        self.backwards(work)
        if self.ways:
            work.sends[:] = [
                tuple(sorted(sends, key=lambda send: -self.ways.get(send[0], 0.0)))
                for sends in work.sends
            ]
        for item, sends in feeds.items():
            work.sends[item] = tuple(sends)
        homes = [self.graph.devices[stage] for stage, found in enumerate(buckets) if found]
        summing = [device for home in homes for device in home]
        self.sums_are_alone = self.messages_are_alone and len(set(summing)) == len(summing)
        work.sums += [
            self.sum(stage, found, work)
            for stage, found in reversed([*enumerate(buckets)])  # as their gradients come
            if found
        ]
        if self.graph.stages.shared_parameters:
            self.shared(work)
        work.num_channels = len(self.numbers)
        return work

    def sum(self, stage: int, buckets: Buckets, work: Work) -> Sum:
        """The sums of a stage's gradients.

        On the device of the loss they are final when the user's step has gone backward, too (see
        :func:`lightning_gpp.schedule.last_backward`).
        """
        share, home = self.shares[stage], self.graph.devices[stage]
        own, count = self.first[stage], 2 * share.num_microbatches
        last = [own + count * number - 1 for number in range(1, share.num_replicas + 1)]
        loss_device = self.graph.devices[FEED][0]
        if self.num_feed_backwards and loss_device in home:
            replica = home.index(loss_device)
            end = self.first_feed - 1
            line = work.lines[loss_device]
            if line.index(end) > line.index(last[replica]):
                last[replica] = end
        shared: tuple[int, ...] = ()
        if not self.sums_are_alone:
            shared = self.numbered(all_reduce_channels(self.request.cluster, tuple(sorted(home))))
        return Sum(home, tuple(last), tuple(buckets), self.feed_port + 1 + stage, shared)

    def forwards(self, work: Work) -> Mapping[int, Sequence[Send]]:
        """Adds the messages with activations; returns those of the feed by its items."""
        edges = self.graph.stages.edges
        feeds: list[tuple[int, float, int, Send]] = []
        if self.has_halves and not self.ways:
            edges = self.graph.path_lengths.forward_sends(edges)
        for rank, edge in enumerate(edges):
            target, messages = self.first[edge.target], self.edge_messages(edge)[0]
            sends = self.sends(edge, messages, is_gradient=False)
            if edge.source != FEED:
                _exchange(work, messages, sends, self.first[edge.source], target)
                continue
            for sender, receiver, kind in messages.each:
                if (how := sends[kind]) is not None:
                    waiting = target + receiver
                    work.missing[waiting] += 1
                    feeds.append((sender, -self.ways.get(waiting, 0.0), rank, (waiting, *how)))
        feeds.sort(key=lambda item: item[:3])
        found: dict[int, list[Send]] = {}
        for sender, *_, send in feeds:
            found.setdefault(self.first_feed + sender * (not self.order.flushes), []).append(send)
        return found

    def backwards(self, work: Work) -> None:
        """Adds the messages with gradients."""
        edges = self.graph.stages.edges
        if self.has_halves and not self.ways:
            edges = self.graph.path_lengths.backward_sends(edges)
        for edge in edges:
            if not edge.has_backward:
                continue
            sender = self.first[edge.target] + self.shares[edge.target].num_microbatches
            receiver = self.first[-1]  # of the feed
            if edge.source != FEED:
                receiver = self.first[edge.source] + self.shares[edge.source].num_microbatches
            messages = self.edge_messages(edge)[1]
            _exchange(
                work, messages, self.sends(edge, messages, is_gradient=True), sender, receiver
            )

    @cached_property
    def ways(self) -> Mapping[int, float]:
        """How far it is from work of replicas that take unequal shares; the feed is at the end.

        Where all forwards come first, messages with the longest way to go are sent first. From
        replicas of equal shares it is equally far, so edges alone are put in order.
        """
        if not (self.has_halves and self.graph.is_uneven):
            return {}
        paths = replica_paths(self)
        replicas = [
            (first + 2 * replica * share.num_microbatches, share.num_microbatches)
            for first, share in zip(self.first, self.shares)
            for replica in range(share.num_replicas)
        ]
        return {
            first + number: paths.forward[replica] if number < count else paths.backward[replica]
            for replica, (first, count) in enumerate(replicas)
            for number in range(2 * count)
        }

    def shared(self, work: Work) -> None:
        """Adds the sums of gradients of parameters that different stages share.

        Devices come to them with all else done. The others send theirs to the first one, which
        sends the sums back.
        """

        def add(device: int, missing: int = 0) -> int:
            work.seconds.append(0.0)
            work.missing.append(missing)
            work.sends.append(())
            work.lines[device].append(len(work.seconds) - 1)
            return len(work.seconds) - 1

        for number, one in enumerate(work.sums):
            waiting = tuple(add(device, 1) for device in one.devices)
            work.sums[number] = one._replace(waiting=waiting)
        for group in reduce_groups(self.graph.stages, self.graph.devices):
            parameters = [self.request.graph.parameter[name] for name in group.parameters]
            size_bytes = sum(one.size_bytes for one in parameters if one.requires_grad)
            if group.stage is not None or not size_bytes:
                continue
            owner, *others = group.devices
            ups = [add(other) for other in others]
            gathered = add(owner)
            for other, up in zip(others, ups):
                there, back = (
                    self.message(*ends, size_bytes, is_feed=False)
                    for ends in ((other, owner), (owner, other))
                )
                assert there is not None and back is not None  # two devices
                for sender, receiver, how in ((up, gathered, there), (gathered, add(other), back)):
                    work.missing[receiver] += 1
                    work.sends[sender] += ((receiver, *how),)

    def sent_s(self) -> list[float]:
        """Of every stage, seconds that the replica that sends most sends per micro-batch."""
        found = [[0.0] * share.num_replicas for share in self.shares]
        for edge in self.graph.stages.edges:
            there, back = self.edge_messages(edge)
            ways = [] if edge.source == FEED else [(edge.source, there, False)]
            ways += [(edge.target, back, True)] if edge.has_backward else []
            for stage, messages, is_gradient in ways:
                sends = self.sends(edge, messages, is_gradient=is_gradient)
                for kind, count, send in zip(messages.kinds, messages.counts, sends):
                    if send is not None:
                        found[stage][kind.pair[0]] += count * send[0]
        return [max(own) / share.num_microbatches for own, share in zip(found, self.shares)]

    def sends(
        self, edge: StageEdge, messages: EdgeMessages, *, is_gradient: bool
    ) -> list[How | None]:
        """How every kind of messages of an edge goes; None on one device."""
        graph, tables = self.graph, self.request.tables
        is_feed = edge.source == FEED
        homes = graph.devices[edge.source][:1] if is_feed else graph.devices[edge.source]
        senders, receivers = homes, graph.devices[edge.target]
        if is_gradient:
            senders, receivers = receivers, senders
        sizes = tables.edge_bytes(edge.values, has_backward=edge.has_backward)
        bytes_of = sizes.backward if is_gradient else sizes.forward
        unit_size = self.request.minibatch_size / self.num_microbatches
        return [
            self.message(
                senders[sender],
                receivers[receiver],
                bytes_of(num_units * unit_size),
                is_feed=is_feed and not is_gradient,
            )
            for (sender, receiver), num_units in messages.kinds
        ]

    def message(
        self, sender: int, receiver: int, size_bytes: float, *, is_feed: bool
    ) -> How | None:
        """How a message goes; None on one device."""
        if sender == receiver:
            return None
        (link,) = self.request.tables.links((sender,), (receiver,))
        assert link is not None
        numbers: tuple[int, ...] = ()
        if not self.messages_are_alone:
            names = channels(self.request.cluster, sender, receiver, is_feed=is_feed)
            numbers = self.numbered(names)
        return link.transfer_s(size_bytes), self.feed_port if is_feed else sender, numbers

    def numbered(self, names: Sequence[str]) -> tuple[int, ...]:
        """Channels by number."""
        return tuple(self.numbers.setdefault(name, len(self.numbers)) for name in names)

    @property
    def loss_reads_others(self) -> bool:
        """Whether the loss waits for stages before the last one, too."""
        edges = self.graph.stages.edges
        return any(e.target == self.num_stages != e.source + 1 and e.source != FEED for e in edges)

    @property
    def starts_apart(self) -> bool:
        """Whether replicas of the last stage begin a micro-batch at different times.

        Stages before it take smaller ones, which arrive one after the other.
        """
        *before, last = self.graph.multiples[: self.num_stages]
        return any(multiple < last for multiple in before)

    def lines(self) -> list[list[int]]:
        """The work of every device in order."""
        graph, loss_device = self.graph, self.graph.devices[FEED][0]
        used = [device for home in graph.devices[: self.num_stages] for device in home]
        if not self.order.flushes:
            return endless_lines(self, 1 + max(used))
        has_loss = self.num_stages < len(self.shares)
        is_late = has_loss and (self.graph.is_uneven or self.loss_reads_others or self.starts_apart)
        if len(set(used)) < len(used) or self.num_feed_backwards or is_late:
            lines = merged_lines(self, 1 + max(used))
        else:
            lines = self.own_lines(1 + max(used))
            if has_loss:
                lines[loss_device] = [*self.with_loss(self.steps[self.num_stages - 1])]
        lines[loss_device].insert(0, self.first_feed)
        return lines

    def own_lines(self, num_devices: int) -> list[list[int]]:
        """The orders of devices that have one stage each."""
        lines: list[list[int]] = [[] for _ in range(num_devices)]
        for stage in range(self.num_stages):
            count = self.shares[stage].num_microbatches
            for replica, device in enumerate(self.graph.devices[stage]):
                first = self.first[stage] + replica * 2 * count
                lines[device] = [first + (s if s >= 0 else count + ~s) for s in self.steps[stage]]
        return lines

    def with_loss(self, steps: Steps) -> Iterator[int]:
        """The order of the first replica of the last stage, which computes the loss, too.

        As merging by unit times has it where the loss reads that stage alone, its shares are equal
        and its inputs arrive together: all replicas end the forward of a micro-batch at the same
        time, and what can start then is a backward first, and the lower micro-batch.
        """
        stage = self.num_stages - 1
        own, loss = self.first[stage], self.first[stage + 1]
        count = self.shares[stage].num_microbatches
        lost = made = 0  # micro-batches with a loss, and with a forward
        for step in steps:
            is_needed = step >= 0 or self.has_halves or ~step == lost
            while lost < made and is_needed:
                yield loss + lost
                if not self.has_halves:
                    yield loss + count + lost
                lost += 1
            if step >= 0:
                made += 1
            elif self.has_halves:
                yield loss + count + ~step
            yield own + (step if step >= 0 else count + ~step)


def _exchange(
    work: Work, messages: EdgeMessages, sends: Sequence[How | None], sender: int, receiver: int
) -> None:
    """Adds the messages between two stages.

    Args:
        work: what they are added to.
        messages: the messages.
        sends: how every kind of them goes; None where there is nothing to send.
        sender: the number of the first work that sends.
        receiver: likewise of what receives.
    """
    if not any(sends):
        return
    missing, found = work.missing, work.sends
    for own, other, kind in messages.each:
        if how := sends[kind]:
            target = receiver + other
            missing[target] += 1
            found[sender + own] += ((target, how[0], how[1], how[2]),)
