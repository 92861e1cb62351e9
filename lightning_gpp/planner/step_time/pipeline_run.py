"""The pipeline of a plan as numbered work, ready to be played.

What :func:`lightning_gpp.schedule.build_program` makes of a plan, without its actions: replicas
take consecutive shares of every micro-batch, and two replicas exchange what their micro-batches
have in common. Where the last stage has replicas, the stage of the loss is on the device of the
first of them, which takes turns between both.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from lightning_gpp.cluster import all_reduce_channels, channels
from lightning_gpp.engine.play import play
from lightning_gpp.engine.work import How, Send, Sum, Work
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

MANY_ITEMS = 300_000
"""So many items of frames are kept about: some dozens of megabytes."""


class Flow(NamedTuple):
    """The messages of an edge in one direction.

    Attributes:
        edge: the edge.
        messages: its messages.
        senders: their devices.
        receivers: likewise.
        source: the number of the first item that sends.
        target: the number of the first item that receives.
        is_gradient: whether they go back.
    """

    edge: StageEdge
    messages: EdgeMessages
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    source: int
    target: int
    is_gradient: bool = False

    @property
    def is_fed(self) -> bool:
        """Whether they are inputs of the model."""
        return self.edge.source == FEED and not self.is_gradient


class Frame(NamedTuple):
    """Of a :class:`~lightning_gpp.engine.work.Work` what does not depend on costs."""

    missing: list[int]
    sends: list[tuple[Send, ...]]
    lines: list[list[int]]


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
        how = count, request.order, plan.order_pace
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
        frame, durations = self._frame(), list[float]()
        for share, replicas in zip(self.shares, self.computes):
            count = share.num_microbatches
            for forward_s, backward_s, _ in replicas:
                durations += [forward_s] * count + [backward_s] * count
        durations += [0.0] * (len(frame.missing) - len(durations))  # the loss, and the feed
        hows = [how for flow in self._flows for how in self._hows(flow)]
        work = Work(durations, frame.missing, frame.sends, hows, frame.lines)
        buckets = [self.sums(stage).buckets for stage in self.plan.stages]
        work.num_ports = self.feed_port + 1 + len(buckets)
        homes = [self.devices[stage] for stage, own in enumerate(buckets) if own]
        summing = [device for home in homes for device in home]
        self.sums_are_alone = self.messages_are_alone and len(set(summing)) == len(summing)
        work.sums += [
            self._summed(stage, own, work)
            for stage, own in reversed([*enumerate(buckets)])  # as their gradients come
            if own
        ]
        if self.stages.shared_parameters:
            work.missing, work.sends = work.missing.copy(), work.sends.copy()
            work.lines = [line.copy() for line in work.lines]
            self._shared(work)
        work.num_channels = len(self._channels)
        return work

    def _frame(self) -> Frame:
        """The frame of the plan's form; plans next to one another often have the same."""
        edges = tuple([(edge.source, edge.target, edge.has_backward) for edge in self.stages.edges])
        shares, count = tuple(self.shares), self.num_microbatches
        form = edges, tuple(self.devices), shares, count, self.order.name, self.order_pace
        known: dict[Hashable, Frame] = self.request.tables.frames
        if form not in known:
            found = self._new_frame()
            if len(known) * len(found.missing) > MANY_ITEMS:
                known.clear()
            known[form] = found
        return known[form]

    def _new_frame(self) -> Frame:
        num_items = self.first_feed + (1 if self.order.flushes else self.num_microbatches)
        missing = [0] * num_items
        sends: list[tuple[Send, ...]] = [()] * num_items
        ways, first_how = self._ways, 0
        fed: list[tuple[int, float, Send]] = []
        for flow in self._flows:
            senders, receivers, kinds = flow.senders, flow.receivers, flow.messages.kinds
            is_sent = [senders[i] != receivers[j] for (i, j), _ in kinds]
            source, target, is_fed = flow.source, flow.target, flow.is_fed
            for own, other, kind in flow.messages.each if any(is_sent) else ():
                if is_sent[kind]:
                    other += target
                    missing[other] += 1
                    if is_fed:
                        fed.append((own, -ways[other], (other, first_how + kind)))
                    else:
                        sends[source + own] += ((other, first_how + kind),)
            first_how += len(is_sent)
        if self.has_halves:  # the longest way first
            for item, several in enumerate(sends):
                if len(several) > 1:
                    sends[item] = tuple(sorted(several, key=lambda send: -ways[send[0]]))
        fed.sort(key=itemgetter(0, 1))
        lines = self.lines()
        if not self.order.flushes:
            for microbatch, _, send in fed:
                sends[self.first_feed + microbatch] += (send,)
        else:
            sends[self.first_feed] = tuple([send for *_, send in fed])
            lines[self.devices[FEED][0]].insert(0, self.first_feed)
        return Frame(missing, sends, lines)

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

    @cached_property
    def _flows(self) -> list[Flow]:
        """Of every edge the messages there, and back."""
        found = []
        for edge in self.stages.edges:
            there, back = self.edge_messages(edge)
            senders, receivers = self.devices[edge.source], self.devices[edge.target]
            source, target = self.first[edge.source], self.first[edge.target]
            found.append(Flow(edge, there, senders, receivers, source, target))
            if edge.has_backward:
                own, other = target + self.shares[edge.target].num_microbatches, source
                if edge.source != FEED:
                    other += self.shares[edge.source].num_microbatches
                found.append(Flow(edge, back, receivers, senders, own, other, is_gradient=True))
        return found

    @cached_property
    def _ways(self) -> list[float]:
        """How far it is from every work to the end of its half; the feed is at the end.

        Where all forwards come first, messages with the longest way to go are sent first.
        """
        found: list[float] = []
        if self.has_halves:
            counts = [s.num_microbatches for s in self.shares for _ in range(s.num_replicas)]
            paths = self.replica_paths
            for count, forward, backward in zip(counts, paths.forward, paths.backward):
                found += [forward] * count + [backward] * count
        return found + [0.0] * (self.first_feed + self.num_microbatches - len(found))

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
                for sender, receiver, how in ((up, gathered, there), (gathered, add(other), back)):
                    work.missing[receiver] += 1
                    work.sends[sender] += ((receiver, len(work.hows)),)
                    work.hows.append(how)

    def sent_s(self) -> list[float]:
        """Of every stage, seconds that the replica that sends most sends per micro-batch."""
        found = [[0.0] * share.num_replicas for share in self.shares]
        for flow in self._flows:
            if not flow.is_fed:
                own = found[flow.edge.target if flow.is_gradient else flow.edge.source]
                kinds, counts, _ = flow.messages
                for kind, count, how in zip(kinds, counts, self._hows(flow)):
                    own[kind.pair[0]] += count * how[0]
        return [max(own) / share.num_microbatches for own, share in zip(found, self.shares)]

    def _hows(self, flow: Flow) -> list[How]:
        """How every kind of messages goes."""
        edge, senders, receivers, size = flow.edge, flow.senders, flow.receivers, self.unit_size
        sizes = self.request.tables.edge_bytes(edge.values, has_backward=edge.has_backward)
        bytes_of = sizes.backward if flow.is_gradient else sizes.forward
        return [
            self._message(senders[i], receivers[j], bytes_of(units * size), is_feed=flow.is_fed)
            for (i, j), units in flow.messages.kinds
        ]

    def _message(self, sender: int, receiver: int, size_bytes: float, *, is_feed: bool) -> How:
        """How a message goes; on one device it takes no time, and is not sent."""
        if sender == receiver:
            return 0.0, sender, ()
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
