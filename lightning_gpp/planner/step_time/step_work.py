"""A step of a plan as numbered work, replica by replica, ready to be played.

What :func:`lightning_gpp.schedule.build_program` makes of a plan, without its actions: replicas
take consecutive shares of every micro-batch, and two replicas exchange what their micro-batches
have in common. Where the last stage has replicas, the stage of the loss is on the device of the
first of them, which takes turns between both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from lightning_gpp.cluster import Cluster, all_reduce_channels, channels
from lightning_gpp.graph import FEED, StageEdge
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan.plan_graph import PlanGraph
from lightning_gpp.planner.step_time.merged_lines import (
    endless_lines,
    merged_lines,
    replica_paths,
)
from lightning_gpp.planner.step_time.numbering import Numbering
from lightning_gpp.planner.step_time.shares import EdgeMessages
from lightning_gpp.planner.step_time.timing import Send, Sum, Work
from lightning_gpp.schedule import Steps, reduce_groups

Buckets = Sequence[tuple[float, float]]
"""Of every sum: seconds until it can begin, and its seconds."""


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
        has_halves = request.order.forwards_first
        super().__init__(graph, num_microbatches, steps, has_halves=has_halves)
        self.request, self.num_stages = request, num_stages
        self.numbers: dict[str, int] = {}
        self.messages_are_alone = are_alone(request.cluster)
        self.has_common_sums = False

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
        durations += [0.0] * self.num_feed_backwards
        missing = [0] * len(durations)
        work = Work(durations, missing, [()] * len(durations), self.lines())
        work.feed_line = self.graph.devices[FEED][0]
        self.forwards(work)
        self.backwards(work)
        if self.ways:
            work.sends[:] = [
                tuple(sorted(sends, key=lambda send: -self.ways.get(send[0], 0.0)))
                for sends in work.sends
            ]
        homes = [self.graph.devices[stage] for stage, found in enumerate(buckets) if found]
        summing = [device for home in homes for device in home]
        self.has_common_sums = len(set(summing)) < len(summing)
        work.sums += [
            self.sum(stage, found, work, _paces(seconds[stage]))
            for stage, found in enumerate(buckets)
            if found
        ]
        if self.graph.stages.shared_parameters:
            self.shared(work)
        work.num_channels = len(self.numbers)
        return work

    def sum(self, stage: int, buckets: Buckets, work: Work, paces: tuple[float, ...]) -> Sum:
        """The sum of a stage's gradients.

        On the device of the loss they are final when the user's step has gone backward, too (see
        :func:`lightning_gpp.schedule.last_backward`).
        """
        last = list(self.last(stage))
        at_once = frozenset[int]()
        loss_device = self.graph.devices[FEED][0]
        if self.num_feed_backwards and loss_device in self.graph.devices[stage]:
            replica = self.graph.devices[stage].index(loss_device)
            end = self.first[-1] + self.num_feed_backwards - 1
            line = work.lines[loss_device]
            if line.index(end) > line.index(last[replica]):
                last[replica] = end
                at_once = frozenset({end})
        devices = self.graph.devices[stage] if self.has_common_sums else ()
        channels_used = self.sum_channels(stage)
        return Sum(
            *(stage, tuple(last), buckets, channels_used),
            at_once=at_once,
            devices=devices,
            paces=paces,
        )

    def last(self, stage: int) -> Iterator[int]:
        """The last backward of every replica of a stage."""
        count = self.shares[stage].num_microbatches
        for replica in range(self.shares[stage].num_replicas):
            yield self.first[stage] + (2 * replica + 2) * count - 1

    def forwards(self, work: Work) -> None:
        """Adds the messages with activations."""
        edges = self.graph.stages.edges
        feeds: list[tuple[int, float, int, Send]] = []
        if self.has_halves:
            edges = self.graph.path_lengths.forward_sends(edges)
        for rank, edge in enumerate(edges):
            target, messages = self.first[edge.target], self.edge_messages(edge)[0]
            sends = self.sends(edge, messages, is_gradient=False)
            if edge.source != FEED:
                work.exchange(messages, sends, self.first[edge.source], target)
                continue
            for sender, receiver, kind in messages.each:
                if (send := sends[kind]) is not None:
                    waiting = target + receiver
                    work.missing[waiting] += 1
                    feeds.append((sender, -self.ways.get(waiting, 0.0), rank, (waiting, *send)))
        feeds.sort(key=lambda item: item[:3])
        work.feeds += [send for *_, send in feeds]

    def backwards(self, work: Work) -> None:
        """Adds the messages with gradients."""
        edges = self.graph.stages.edges
        if self.has_halves:
            edges = self.graph.path_lengths.backward_sends(edges)
        for edge in edges:
            if not edge.has_backward:
                continue
            sender = self.first[edge.target] + self.shares[edge.target].num_microbatches
            receiver = self.first[-1]  # of the feed
            if edge.source != FEED:
                receiver = self.first[edge.source] + self.shares[edge.source].num_microbatches
            messages = self.edge_messages(edge)[1]
            work.exchange(messages, self.sends(edge, messages, is_gradient=True), sender, receiver)

    @cached_property
    def ways(self) -> Mapping[int, float]:
        """How far it is from work of replicas that take unequal shares; the feed is at the end.

        Where all forwards come first, messages with the longest way to go are sent first. From
        replicas of equal shares it is equally far, so edges alone are put in order.
        """
        if not (self.has_halves and self.is_uneven):
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

        for number, found in enumerate(work.sums):
            home = self.graph.devices[found.stage]
            work.sums[number] = replace(found, then=tuple(add(device, 1) for device in home))
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
                work.send(up, gathered, *there)
                work.send(gathered, add(other), *back)

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
    ) -> list[tuple[float, tuple[int, ...]] | None]:
        """Seconds and channels of every kind of messages of an edge; None on one device."""
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
    ) -> tuple[float, tuple[int, ...]] | None:
        """Seconds and channels of a message; None on one device."""
        if sender == receiver:
            return None
        (link,) = self.request.tables.links((sender,), (receiver,))
        assert link is not None
        numbers: tuple[int, ...] = ()
        if not self.messages_are_alone:
            names = channels(self.request.cluster, sender, receiver, is_feed=is_feed)
            numbers = self.numbered(names)
        return link.transfer_s(size_bytes), numbers

    def sum_channels(self, stage: int) -> tuple[int, ...]:
        """The channels of the sums of a stage."""
        if self.messages_are_alone and not self.has_common_sums:
            return ()
        home = tuple(sorted(self.graph.devices[stage]))
        return self.numbered(all_reduce_channels(self.request.cluster, home))

    def numbered(self, names: Sequence[str]) -> tuple[int, ...]:
        """Channels by number."""
        return tuple(self.numbers.setdefault(name, len(self.numbers)) for name in names)

    @property
    def is_uneven(self) -> bool:
        """Whether a stage has replicas that take unequal shares."""
        return any(len(set(share.units)) > 1 for share in self.shares)

    @property
    def loss_reads_others(self) -> bool:
        """Whether the loss waits for stages before the last one, too."""
        edges = self.graph.stages.edges
        return any(e.target == self.num_stages != e.source + 1 and e.source != FEED for e in edges)

    def lines(self) -> list[list[int]]:
        """The work of every device in order."""
        graph = self.graph
        used = [device for home in graph.devices[: self.num_stages] for device in home]
        lines: list[list[int]] = [[] for _ in range(1 + max(used))]
        has_loss = self.num_stages < len(self.shares)
        is_late = has_loss and (self.is_uneven or self.loss_reads_others)
        if len(set(used)) < len(used) or self.num_feed_backwards or is_late:
            make = merged_lines if self.request.order.flushes else endless_lines
            return make(self, len(lines))
        for stage in range(self.num_stages):
            count = self.shares[stage].num_microbatches
            for replica, device in enumerate(graph.devices[stage]):
                first = self.first[stage] + replica * 2 * count
                line = [first + (s if s >= 0 else count + ~s) for s in self.steps[stage]]
                lines[device] = line
        if has_loss:
            device = graph.devices[-1][0]
            lines[device] = [*self.with_loss(self.steps[self.num_stages - 1])]
        return lines

    def with_loss(self, steps: Steps) -> Iterator[int]:
        """The order of the first replica of the last stage, which computes the loss, too.

        As merging by unit times has it where the loss reads that stage alone and its shares are
        equal: all replicas end the forward of a micro-batch at the same time, and what can start
        then is a backward first, and the lower micro-batch.
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


def _paces(replicas: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """The backwards of replicas as parts of the longest; none where all last equally long."""
    longest_s = max([backward_s for _, backward_s in replicas])
    paces = tuple([backward_s / longest_s if longest_s else 1.0 for _, backward_s in replicas])
    return paces if min(paces) < 1.0 else ()


def are_alone(cluster: Cluster) -> bool:
    """Whether every message has the port of its device for itself, as no link is shared."""
    return not any(link.is_shared or not link.is_full_duplex for link in cluster.links)
