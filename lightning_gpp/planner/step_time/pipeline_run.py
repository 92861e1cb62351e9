"""The pipeline of a plan as numbered work, ready to be played.

What :func:`lightning_gpp.schedule.build_program` makes of a plan, without its actions: replicas
take consecutive shares of every micro-batch, and two replicas exchange what their micro-batches
have in common. Where the last stage has replicas, the stage of the loss is on the device of the
first of them, which takes turns between both.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from lightning_gpp.cluster import all_reduce_channels, channels
from lightning_gpp.engine.play import play
from lightning_gpp.engine.work import How, Send, Sum, Work
from lightning_gpp.graph import FEED
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.plan.plan_graph import plan_graph
from lightning_gpp.planner.request_tables import StageCompute
from lightning_gpp.planner.step_time.gradients import NO_SUMS, StageSums, stage_sums
from lightning_gpp.planner.step_time.lanes import Flow, stand_ins
from lightning_gpp.planner.step_time.stage_costs import replica_computes
from lightning_gpp.schedule.lower import reduce_groups
from lightning_gpp.schedule.numbering import Exchange, Numbering

Buckets = Sequence[tuple[float, float]]
"""Of every sum: the part of the last backward before it, and its seconds."""

MANY_ITEMS = 300_000
"""So many items of frames are kept about: some dozens of megabytes."""


FEW_ITEMS = 1000
"""So few items are played sooner than it is found which of them need not be."""


class Frame(NamedTuple):
    """The part of a step's work that does not depend on costs.

    And the replicas of every stage that are played; see :mod:`.lanes`. The last item is what others
    receive.
    """

    kept: Sequence[Sequence[int]]
    missing: list[int]
    sends: list[tuple[Send, ...]]
    lines: list[list[int]]


class PipelineRun(Numbering):
    """One step of a plan on the request's cluster.

    Args:
        plan: the plan.
        request: what it is a plan of.
        count: smallest micro-batches that are played; all of the plan if not given.

    Attributes:
        graph: its stages, that of the loss included.
        unit_size: samples of a smallest micro-batch.

    Raises:
        ValueError: the plan does not fit the model, or has no number of micro-batches.
    """

    def __init__(self, plan: Plan, request: PlanRequest, count: int | None = None) -> None:
        full, graph = num_microbatches(plan, request), plan_graph(plan, request.graph)
        if request.num_minibatches > 1:
            graph = graph.with_needs(frozenset())
        how = count or full, request.order, plan.order_pace
        super().__init__(graph.stages, graph.devices, graph.shares, *how)
        self.plan, self.request, self.graph = plan, request, graph
        self.unit_size = request.minibatch_size / full
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
        """Compute of every replica of every stage of the plan."""
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

    def ahead_bytes(self, stage: Stage, units: int) -> int:
        """Bytes of the inputs of the next step that a replica of a stage holds.

        Args:
            stage: the stage.
            units: the replica's share of a micro-batch, in smallest ones.
        """
        if not self.request.feeds_ahead:
            return 0
        edges = (edge for edge in self.graph.stages.edges if edge.target == stage.id)
        sizes = [self.request.tables.edge_bytes(e.values) for e in edges if e.source == FEED]
        share = self.request.minibatch_size * units / stage.microbatch_multiple
        return round(sum(size.forward(share) for size in sizes))

    def _work(self) -> Work:
        """All that is played."""
        frame, durations = self._frame(), list[float]()
        for share, replicas, kept in zip(self.shares, self.computes, self.kept):
            count = share.num_microbatches
            for replica in kept:
                forward_s, backward_s, _ = replicas[replica]
                durations += [forward_s] * count + [backward_s] * count
        durations += [0.0] * (len(frame.missing) - len(durations))  # the loss, and the feed
        hows = [how for flow, some in self._sent for how in self._hows(flow, some)]
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
        self.keep(known[form].kept)
        return known[form]

    def _new_frame(self) -> Frame:
        stands_for = self._stand_ins()
        self.keep([sorted({*own}) for own in stands_for])
        num_items = self.first_feed + (1 if self.order.flushes else self.num_microbatches)
        missing = [0] * (num_items + 1)
        sends: list[tuple[Send, ...]] = [()] * len(missing)
        fed: list[tuple[int, Send]] = []
        for flow, one, hows in self._in_turn(stands_for):
            sender, receiver = self._start(flow, flow.source, one.sender), -1
            if (flow.target, one.receiver) in self.begin:
                receiver = self._start(flow, flow.target, one.receiver)
            for own, other, units in one.each:
                other = receiver + other if receiver >= 0 else num_items
                missing[other] += 1
                if flow.is_fed:
                    fed.append((own, (other, hows[units])))
                else:
                    sends[sender + own] += ((other, hows[units]),)
        fed.sort(key=itemgetter(0))
        lines = self.lines()
        if not self.order.flushes:
            for microbatch, send in fed:
                sends[self.first_feed + microbatch] += (send,)
        else:
            sends[self.first_feed] = tuple([send for _, send in fed])
            lines[self.devices[FEED][0]].insert(0, self.first_feed)
        return Frame(self.kept, missing, sends, lines)

    def _stand_ins(self) -> list[list[int]]:
        """The replica that stands for each replica of every stage, itself where channels count."""
        kinds, link = self.request.cluster.devices, self.request.tables.links
        is_worth_it = self.first_feed > FEW_ITEMS and max(map(len, self.devices)) > 2
        if not (is_worth_it and self.messages_are_alone) or self.stages.shared_parameters:
            return [[*range(len(home))] for home in self.devices]
        work = [
            [(units, kinds[device].kind) for units, device in zip(share.units, home)]
            for share, home in zip(self.shares, self.devices)
        ]
        return stand_ins(self.devices, work, self._flows, lambda a, b: link((a,), (b,)))

    def _in_turn(
        self, stands_for: Sequence[Sequence[int]]
    ) -> list[tuple[Flow, Exchange, dict[int, int]]]:
        """All that is sent, with the numbers of how; the longest way first where halves have one.

        Where all forwards come first, messages with the longest way to go are sent first.
        """
        found, count = [], 0
        for flow, some in self._sent:
            senders, receivers = self.devices[flow.source], self.devices[flow.target]
            for one in some:
                numbers = {units: number for number, units in enumerate(one.counts, count)}
                count += len(numbers)
                if senders[one.sender] != receivers[one.receiver]:
                    found.append((flow, one, numbers))
        if self.has_halves:
            paths, places = self.replica_paths, {one: n for n, one in enumerate(self.begin)}

            def way(flow: Flow, one: Exchange) -> float:
                """How far it is to the end of the half; the feed is there."""
                if flow.target == FEED:
                    return 0.0
                half = paths.backward if flow.is_gradient else paths.forward
                return half[places[flow.target, stands_for[flow.target][one.receiver]]]

            found.sort(key=lambda each: -way(*each[:2]))
        return found

    def _start(self, flow: Flow, stage: int, replica: int) -> int:
        """The number of a replica's first work that sends or receives."""
        is_second = flow.is_gradient and stage != FEED
        return self.begin[stage, replica] + is_second * self.shares[stage].num_microbatches

    def _summed(self, stage: int, buckets: Buckets, work: Work) -> Sum:
        """The sums of a stage's gradients.

        On the device of the loss they are final when the user's step has gone backward, too (see
        :meth:`.Program.last_backward`).
        """
        share, home = self.shares[stage], self.devices[stage]
        kept, count = self.kept[stage], 2 * share.num_microbatches
        played = tuple([home[replica] for replica in kept])
        last = [self.begin[stage, replica] + count - 1 for replica in kept]
        loss_device = self.devices[FEED][0]
        if self.num_feed_backwards and loss_device in played:
            replica = played.index(loss_device)
            end = self.first_feed - 1
            line = work.lines[loss_device]
            if line.index(end) > line.index(last[replica]):
                last[replica] = end
        shared: tuple[int, ...] = ()
        if not self.sums_are_alone:
            shared = self._numbered(all_reduce_channels(self.request.cluster, tuple(sorted(home))))
        port = self.feed_port + 1 + stage
        return Sum(played, tuple(last), tuple(buckets), port, shared, place=min(home))

    @cached_property
    def _flows(self) -> list[Flow]:
        """Of every edge the messages there, and back."""
        found = []
        for edge in self.stages.edges:
            there, back = self.edge_messages(edge)
            found.append(Flow(edge, there, edge.source, edge.target))
            if edge.has_backward:
                found.append(Flow(edge, back, edge.target, edge.source, is_gradient=True))
        return found

    @cached_property
    def _sent(self) -> list[tuple[Flow, list[Exchange]]]:
        """What is sent by what is played."""
        begin = self.begin
        return [
            (flow, [one for one in flow.exchanges if (flow.source, one.sender) in begin])
            for flow in self._flows
        ]

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
        once = PipelineRun(self.plan, self.request, self.graph.units_at_a_time)
        found = [[0.0] * share.num_replicas for share in once.shares]
        for flow, some in once._sent:
            if not flow.is_fed:
                counts = [(one.sender, count) for one in some for count in one.counts.values()]
                for (sender, count), how in zip(counts, once._hows(flow, some)):
                    found[flow.source][sender] += count * how[0]
        return [max(own) / share.num_microbatches for own, share in zip(found, once.shares)]

    def fed_s(self) -> float:
        """Seconds that the port of the feed needs for the inputs of a step."""
        plain = PipelineRun(self.plan, replace(self.request, inputs_ahead=False))
        found = 0.0
        for flow, some in plain._sent:
            if flow.is_fed:
                counts = [count for one in some for count in one.counts.values()]
                found += sum(n * how[0] for n, how in zip(counts, plain._hows(flow, some)))
        return found

    def _hows(self, flow: Flow, some: Iterable[Exchange]) -> list[How]:
        """How messages of every size go from replica to replica."""
        edge, size, is_fed = flow.edge, self.unit_size, flow.is_fed
        senders, receivers = self.devices[flow.source], self.devices[flow.target]
        sizes = self.request.tables.edge_bytes(edge.values, has_backward=edge.has_backward)
        bytes_of = sizes.backward if flow.is_gradient else sizes.forward
        return [
            self._message(senders[i], receivers[j], bytes_of(units * size), is_feed=is_fed)
            for i, j, _, counts in some
            for units in counts
        ]

    def _message(self, sender: int, receiver: int, size_bytes: float, *, is_feed: bool) -> How:
        """How a message goes; what is there already takes no time."""
        if sender == receiver or (is_feed and self.request.feeds_ahead):
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
