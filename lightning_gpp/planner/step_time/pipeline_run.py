"""The pipeline of a plan as numbered work, ready to be played.

What :func:`lightning_gpp.schedule.build_program` makes of a plan, without its actions: replicas
take consecutive shares of every micro-batch, and two replicas exchange what their micro-batches
have in common. Where the last stage has replicas, the stage of the loss is on the device of the
first of them, which takes turns between both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

from lightning_gpp.cluster import all_reduce_channels, channels
from lightning_gpp.engine.play import play
from lightning_gpp.engine.work import Send, Sum, Work
from lightning_gpp.graph import FEED, StageEdge
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.plan.plan_graph import plan_graph
from lightning_gpp.planner.request_tables import StageCompute
from lightning_gpp.planner.step_time.gradients import NO_SUMS, StageSums, stage_sums
from lightning_gpp.planner.step_time.stage_costs import replica_computes
from lightning_gpp.schedule.lower import reduce_groups
from lightning_gpp.schedule.numbering import EdgeMessages, Numbering

Buckets = Sequence[tuple[float, float]]
"""Of every sum: the part of the last backward before it, and its seconds."""

How = tuple[float, int, tuple[int, ...]]
"""Of a message: its seconds, its port, and the channels that it shares with others."""


class PipelineRun(Numbering):
    """One step of a plan on the request's cluster.

    Args:
        plan: the plan.
        request: what it is a plan of.

    Attributes:
        graph: its stages, that of the loss included.
        unit_size: samples of a smallest micro-batch.

    Raises:
        ValueError: the plan does not fit the model, or has no number of micro-batches.
    """

    def __init__(self, plan: Plan, request: PlanRequest) -> None:
        count, graph = num_microbatches(plan, request), plan_graph(plan, request.graph)
        if request.num_minibatches > 1:
            graph = graph.with_needs(frozenset())
        steps = request.order.steps(graph.stages, count, graph.multiples)
        how = count, steps, request.order, plan.order_pace
        super().__init__(graph.stages, graph.devices, graph.shares, *how)
        self.plan, self.request, self.graph = plan, request, graph
        self.unit_size = request.minibatch_size / count
        self._channels: dict[str, int] = {}
        self.messages_are_alone = request.cluster.has_private_channels
        self.sums_are_alone = False
        self.feed_port = self.num_devices

    def step_s(self, at_most_s: float = math.inf) -> float:
        """Seconds of the step; infinite where it takes longer than is of interest.

        Args:
            at_most_s: the longest step that is.

        Raises:
            ValueError: devices wait for each other for ever.
        """
        played = play(self._work(), at_most_s)
        if played is None:
            return math.inf
        if played.stuck:
            raise ValueError(
                f"devices {sorted(played.stuck)} wait for each other: the orders deadlock"
            )
        return played.step_s

    @cached_property
    def computes(self) -> Sequence[Sequence[StageCompute]]:
        """Of every stage of the plan, what every replica computes."""
        return [replica_computes(self.request, stage, self.unit_size) for stage in self.plan.stages]

    def busiest_s(self) -> float:
        """Seconds that the busiest device computes; no step is shorter."""
        busy_s: dict[int, float] = {}
        for stage, replicas in zip(self.plan.stages, self.computes):
            count = self.num_microbatches // stage.microbatch_multiple
            for device, one in zip(stage.devices, replicas):
                own_s = count * (one.forward_s + one.backward_s)
                busy_s[device] = busy_s.get(device, 0.0) + own_s
        return max(busy_s.values())

    @cached_property
    def in_flight(self) -> Mapping[int, int]:
        """Micro-batches of every stage between forward and backward at the peak."""
        return self.request.order.peak_in_flight(
            self.graph.stages, self.num_microbatches, self.graph.multiples
        )

    def sums(self, stage: Stage) -> StageSums:
        """The sums of a stage's gradients over its replicas."""
        if stage.num_replicas == 1:
            return NO_SUMS
        own = self.graph.own_parameters[stage.id]
        return stage_sums(self.request, stage, self.unit_size, own)

    def _work(self) -> Work:
        """All that is played."""
        computes, buckets = self.computes, [self.sums(stage).buckets for stage in self.plan.stages]
        durations: list[float] = []
        nothing = [[StageCompute(0.0, 0.0, 0)]] * (len(self.shares) - len(computes))  # the loss
        for share, replicas in zip(self.shares, [*computes, *nothing], strict=True):
            count = share.num_microbatches
            for forward_s, backward_s, _ in replicas:
                durations += [forward_s] * count + [backward_s] * count
        feeds = 1 if self.order.flushes else self.num_microbatches
        durations += [0.0] * (self.num_feed_backwards + feeds)
        missing = [0] * len(durations)
        lines = self.lines()
        if self.order.flushes:
            lines[self.devices[FEED][0]].insert(0, self.first_feed)
        work = Work(durations, missing, [()] * len(durations), lines)
        work.num_ports = self.feed_port + 1 + len(buckets)
        fed = self._forwards(work)
        self._backwards(work)
        if self._ways:
            for item, sends in enumerate(work.sends):
                if len(sends) > 1:
                    way = self._ways
                    work.sends[item] = tuple(sorted(sends, key=lambda one: -way.get(one[0], 0.0)))
        for item, found in fed.items():
            work.sends[item] = tuple(found)
        homes = [self.devices[stage] for stage, own in enumerate(buckets) if own]
        summing = [device for home in homes for device in home]
        self.sums_are_alone = self.messages_are_alone and len(set(summing)) == len(summing)
        work.sums += [
            self._summed(stage, own, work)
            for stage, own in reversed([*enumerate(buckets)])  # as their gradients come
            if own
        ]
        if self.stages.shared_parameters:
            self._shared(work)
        work.num_channels = len(self._channels)
        return work

    def _summed(self, stage: int, buckets: Buckets, work: Work) -> Sum:
        """The sums of a stage's gradients.

        On the device of the loss they are final when the user's step has gone backward, too (see
        :meth:`.Program.last_backward`).
        """
        share, home = self.shares[stage], self.devices[stage]
        own, count = self.first[stage], 2 * share.num_microbatches
        last = [own + count * number - 1 for number in range(1, share.num_replicas + 1)]
        loss_device = self.devices[FEED][0]
        if self.num_feed_backwards and loss_device in home:
            replica = home.index(loss_device)
            end = self.first_feed - 1
            line = work.lines[loss_device]
            if line.index(end) > line.index(last[replica]):
                last[replica] = end
        shared: tuple[int, ...] = ()
        if not self.sums_are_alone:
            shared = self._numbered(all_reduce_channels(self.request.cluster, tuple(sorted(home))))
        return Sum(home, tuple(last), tuple(buckets), self.feed_port + 1 + stage, shared)

    def _forwards(self, work: Work) -> Mapping[int, Sequence[Send]]:
        """Adds the messages with activations; returns those of the feed by its items."""
        feeds: list[tuple[int, float, int, Send]] = []
        for rank, edge in enumerate(self.stages.edges):
            target, messages = self.first[edge.target], self.edge_messages(edge)[0]
            sends = self._sends(edge, messages, is_gradient=False)
            if edge.source != FEED:
                _exchange(work, messages, sends, self.first[edge.source], target)
                continue
            for sender, receiver, kind in messages.each:
                if (how := sends[kind]) is not None:
                    waiting = target + receiver
                    work.missing[waiting] += 1
                    feeds.append((sender, -self._ways.get(waiting, 0.0), rank, (waiting, *how)))
        feeds.sort(key=lambda item: item[:3])
        found: dict[int, list[Send]] = {}
        for sender, *_, send in feeds:
            found.setdefault(self.first_feed + sender * (not self.order.flushes), []).append(send)
        return found

    def _backwards(self, work: Work) -> None:
        """Adds the messages with gradients."""
        for edge in self.stages.edges:
            if not edge.has_backward:
                continue
            sender = self.first[edge.target] + self.shares[edge.target].num_microbatches
            receiver = self.first[-1]  # of the feed
            if edge.source != FEED:
                receiver = self.first[edge.source] + self.shares[edge.source].num_microbatches
            messages = self.edge_messages(edge)[1]
            _exchange(
                work, messages, self._sends(edge, messages, is_gradient=True), sender, receiver
            )

    @cached_property
    def _ways(self) -> Mapping[int, float]:
        """How far it is from every work to the end of its half; the feed is at the end.

        Where all forwards come first, messages with the longest way to go are sent first.
        """
        if not self.has_halves:
            return {}
        paths = self.replica_paths
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

    def _shared(self, work: Work) -> None:
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
        for group in reduce_groups(self.graph.stages, self.devices):
            parameters = [self.request.graph.parameter[name] for name in group.parameters]
            size_bytes = sum(one.size_bytes for one in parameters if one.requires_grad)
            if group.stage is not None or not size_bytes:
                continue
            owner, *others = group.devices
            ups = [add(other) for other in others]
            gathered = add(owner)
            for other, up in zip(others, ups):
                there, back = (
                    self._message(*ends, size_bytes, is_feed=False)
                    for ends in ((other, owner), (owner, other))
                )
                assert there is not None and back is not None  # two devices
                for sender, receiver, how in ((up, gathered, there), (gathered, add(other), back)):
                    work.missing[receiver] += 1
                    work.sends[sender] += ((receiver, *how),)

    def sent_s(self) -> list[float]:
        """Of every stage, seconds that the replica that sends most sends per micro-batch."""
        found = [[0.0] * share.num_replicas for share in self.shares]
        for edge in self.stages.edges:
            there, back = self.edge_messages(edge)
            ways = [] if edge.source == FEED else [(edge.source, there, False)]
            ways += [(edge.target, back, True)] if edge.has_backward else []
            for stage, messages, is_gradient in ways:
                sends = self._sends(edge, messages, is_gradient=is_gradient)
                for kind, count, send in zip(messages.kinds, messages.counts, sends):
                    if send is not None:
                        found[stage][kind.pair[0]] += count * send[0]
        return [max(own) / share.num_microbatches for own, share in zip(found, self.shares)]

    def _sends(
        self, edge: StageEdge, messages: EdgeMessages, *, is_gradient: bool
    ) -> list[How | None]:
        """How every kind of messages of an edge goes; None on one device."""
        devices, tables = self.devices, self.request.tables
        is_feed = edge.source == FEED
        homes = devices[edge.source][:1] if is_feed else devices[edge.source]
        senders, receivers = homes, devices[edge.target]
        if is_gradient:
            senders, receivers = receivers, senders
        sizes = tables.edge_bytes(edge.values, has_backward=edge.has_backward)
        bytes_of = sizes.backward if is_gradient else sizes.forward
        return [
            self._message(
                senders[sender],
                receivers[receiver],
                bytes_of(num_units * self.unit_size),
                is_feed=is_feed and not is_gradient,
            )
            for (sender, receiver), num_units in messages.kinds
        ]

    def _message(
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
            numbers = self._numbered(names)
        return link.transfer_s(size_bytes), self.feed_port if is_feed else sender, numbers

    def _numbered(self, names: Sequence[str]) -> tuple[int, ...]:
        """Channels by number."""
        return tuple(self._channels.setdefault(name, len(self._channels)) for name in names)


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


def num_microbatches(plan: Plan, request: PlanRequest) -> int:
    """Smallest micro-batches of a mini-batch; of all mini-batches that overlap.

    Raises:
        ValueError: neither the plan nor the request has a number.
    """
    count = plan.num_microbatches or request.num_microbatches
    if request.num_minibatches > 1:
        count = request.num_minibatches
    if count is None:
        raise ValueError(
            "the plan does not say how many micro-batches a mini-batch has; set its "
            "num_microbatches, or the one of the request"
        )
    return count
