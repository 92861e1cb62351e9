"""A program: the ordered actions of every device, usually for one mini-batch.

Every replica of a stage is a stage of its own here, on a device of its own: the program's stage
ids count replicas. All sizes are in *units*, the smallest micro-batches of the mini-batch. A stage
that takes ``u`` units at a time divides the mini-batch into pieces of ``u`` units; its replicas
take their shares of a piece one after the other, so each gets one micro-batch of every piece:

.. code-block:: text

    units              0   1   2   3   4   5   6   7
    stage 0            0F0 0F1 0F2 0F3 0F4 0F5 0F6 0F7      takes 1 unit
    stage 1, 2 copies  1F0-------- 2F0 1F1-------- 2F1      take 3 units and 1
    stage 2            3F0------------ 3F1------------      takes 4 units

What two stages hand over in one message is what a piece of the one and a piece of the other have
in common.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_gpp.graph import FEED, StageEdge
from lightning_gpp.schedule.action import Action, Kind, Message
from lightning_gpp.schedule.program_parts import Part, ReduceGroup, Replica
from lightning_gpp.schedule.schedules import Schedule


@dataclass(frozen=True)
class Program:
    """The actions of all devices for one mini-batch, or for several that overlap.

    Attributes:
        schedule: name of the schedule it was made from.
        num_microbatches: smallest micro-batches (units); each is a mini-batch where the schedule
            does not drain between them.
        devices: device of every stage. The last stage computes the loss; the feed is on its device.
        multiples: units in one micro-batch of every stage.
        edges: the edges between the stages.
        actions: actions of every device, in order.
        reduce_groups: the parameters that REDUCE actions all-reduce; see :meth:`reduce_group`.
        replicas: the plan's stage and the replica that every stage stands for; by default stage
            ``i`` itself.
    """

    schedule: Schedule
    num_microbatches: int
    devices: tuple[int, ...]
    multiples: tuple[int, ...]
    edges: tuple[StageEdge, ...]
    actions: tuple[tuple[Action, ...], ...]
    reduce_groups: tuple[ReduceGroup, ...] = ()
    replicas: tuple[Replica, ...] = ()

    def __str__(self) -> str:
        return "\n".join(
            f"device {device}: {' '.join(map(str, actions))}"
            for device, actions in enumerate(self.actions)
        )

    @property
    def num_stages(self) -> int:
        """Number of stages, the feed not counted."""
        return len(self.devices)

    @cached_property
    def num_minibatches(self) -> int:
        """Mini-batches that overlap, or one."""
        return 1 if self.schedule.flushes else self.num_microbatches

    @cached_property
    def loss_stage(self) -> int:
        """The stage that computes the loss: the last one."""
        return len(self.devices) - 1

    @cached_property
    def has_backward(self) -> bool:
        """Whether it trains."""
        return self.schedule.has_backward

    @cached_property
    def edge(self) -> dict[tuple[int, int], StageEdge]:
        """Edge by (source, target)."""
        return {(edge.source, edge.target): edge for edge in self.edges}

    @cached_property
    def out_edges(self) -> dict[int, tuple[StageEdge, ...]]:
        """Stage (or feed) -> edges that leave it."""
        every = range(FEED, self.num_stages)
        return {stage: tuple(e for e in self.edges if e.source == stage) for stage in every}

    @cached_property
    def in_edges(self) -> dict[int, tuple[StageEdge, ...]]:
        """Stage (or feed) -> edges that enter it."""
        every = range(FEED, self.num_stages)
        return {stage: tuple(e for e in self.edges if e.target == stage) for stage in every}

    @cached_property
    def feed_has_backward(self) -> bool:
        """Whether gradients go back into the user's step before the pipelined forward."""
        return self.has_backward and any(edge.has_backward for edge in self.out_edges[FEED])

    @cached_property
    def has_replicas(self) -> bool:
        """Whether gradients of replicas are summed."""
        return any(group.stage is not None for group in self.reduce_groups)

    def device(self, stage: int) -> int:
        """Device of a stage; the feed is where the loss is."""
        return self.devices[self.loss_stage if stage == FEED else stage]

    def replica(self, stage: int) -> Replica:
        """Which stage of the plan a stage (or the feed) is."""
        if stage == FEED or not self.replicas:
            return Replica(stage)
        return self.replicas[stage]

    def multiple(self, stage: int) -> int:
        """Units of a stage's micro-batch; the feed goes at the pace of the loss."""
        return self.multiples[self.loss_stage if stage == FEED else stage]

    def units(self, stage: int, microbatch: int) -> range:
        """The units in one micro-batch of a stage."""
        first, size = self._pieces[stage]
        start = microbatch * size + first
        return range(start, start + self.multiple(stage))

    @cached_property
    def _pieces(self) -> dict[int, tuple[int, int]]:
        """Stage (or feed) -> where its share of a piece begins, and units in the piece."""
        found = {FEED: (0, self.multiple(FEED))}
        for stage in range(self.num_stages):
            replica = self.replica(stage)
            first = stage - replica.index
            sizes = self.multiples[first : first + replica.count]
            found[stage] = sum(sizes[: replica.index]), sum(sizes)
        return found

    def minibatch(self, action: Action) -> int:
        """The mini-batch that a compute action, a sum or an update is of."""
        if self.num_minibatches == 1:
            return 0
        if action.kind is Kind.REDUCE:
            return action.microbatch // len(self.reduce_groups)
        return action.microbatch

    def reduce_group(self, number: int) -> ReduceGroup:
        """What the REDUCE actions of a number sum, which is their ``microbatch``."""
        return self.reduce_groups[number % len(self.reduce_groups)]

    def sums(self) -> Iterator[tuple[int, int, ReduceGroup]]:
        """The all-reduces: (number of the REDUCE actions, mini-batch, group) in order."""
        for minibatch in range(self.num_minibatches):
            for index, group in enumerate(self.reduce_groups):
                yield index + minibatch * len(self.reduce_groups), minibatch, group

    def last_backward(self, device: int, stage: int, minibatch: int = 0) -> Action | None:
        """The backward of a device after which the gradients of one of its stages are final.

        The user's step may read the same parameters, so its backwards, before and after the
        pipelined forward, count for all stages of its device.

        Args:
            device: whose backward.
            stage: id of the stage in the plan.
            minibatch: of which mini-batch.

        Returns:
            The backward; None where the device has none.
        """
        counted = (stage, FEED, self.replica(self.loss_stage).stage)
        for action in reversed(self.actions[device]):
            is_counted = self.replica(action.stage).stage in counted
            if action.kind is Kind.BACKWARD and is_counted and self.minibatch(action) == minibatch:
                return action
        return None

    def is_local(self, edge: StageEdge) -> bool:
        """Whether both ends are on one device, so that no message is needed."""
        return self.device(edge.source) == self.device(edge.target)

    @cached_property
    def parts(self) -> dict[tuple[int, int], tuple[Part, ...]]:
        """(source, target) of an edge -> its messages in the order of their units."""
        return {pair: tuple(self._parts(*pair)) for pair in self.edge}

    def _parts(self, source: int, target: int) -> Iterator[Part]:
        first, size = self._pieces[target]
        share = self.multiple(target)
        for microbatch in range(self.num_microbatches // self._pieces[source][1]):
            units = self.units(source, microbatch)
            piece = max(0, (units.start - first - share) // size + 1)
            while (start := piece * size + first) < units.stop:
                stop = min(units.stop, start + share)
                yield Part(microbatch, piece, max(units.start, start), stop)
                piece += 1

    @cached_property
    def _indices(self) -> dict[tuple[int, int, int, int], list[int]]:
        """Source and target of an edge, one of them, its micro-batch -> its messages there."""
        found: defaultdict[tuple[int, int, int, int], list[int]] = defaultdict(list)
        for (source, target), parts in self.parts.items():
            for index, part in enumerate(parts):
                found[source, target, source, part.source_microbatch].append(index)
                found[source, target, target, part.target_microbatch].append(index)
        return dict(found)

    def exchanged(
        self, action: Action, *, is_needed: bool, edges: Sequence[StageEdge] | None = None
    ) -> Iterator[tuple[StageEdge, Message]]:
        """The parts that a compute action receives from other stages, or makes for them, by edge.

        Args:
            action: a forward or a backward.
            is_needed: which of them.
            edges: those of the stage in another order.
        """
        is_forward = action.kind is Kind.FORWARD
        if edges is None:
            by_stage = self.in_edges if is_forward is is_needed else self.out_edges
            edges = by_stage[action.stage]
        for edge in edges:
            if is_forward or edge.has_backward:
                ends = (edge.source, edge.target) if is_forward else (edge.target, edge.source)
                place = edge.source, edge.target, action.stage, action.microbatch
                for index in self._indices.get(place, ()):
                    yield edge, (*ends, not is_forward, index)

    @cached_property
    def out_groups(self) -> dict[int, tuple[tuple[StageEdge, ...], ...]]:
        """Stage (or feed) -> the edges that leave it, those to replicas of one stage together."""
        return {stage: self._groups(edges, 1) for stage, edges in self.out_edges.items()}

    @cached_property
    def in_groups(self) -> dict[int, tuple[tuple[StageEdge, ...], ...]]:
        """Stage (or feed) -> the edges that enter it, those from replicas of one stage together."""
        return {stage: self._groups(edges, 0) for stage, edges in self.in_edges.items()}

    def _groups(self, edges: Sequence[StageEdge], end: int) -> tuple[tuple[StageEdge, ...], ...]:
        found: dict[int, list[StageEdge]] = {}
        for edge in edges:
            other = (edge.source, edge.target)[end]
            found.setdefault(self.replica(other).stage, []).append(edge)
        return tuple(map(tuple, found.values()))

    def messages(
        self, edges: Sequence[StageEdge], stage: int, microbatch: int
    ) -> tuple[tuple[StageEdge, int, Part, bool], ...]:
        """The messages of one micro-batch of a stage with the replicas of another.

        Args:
            edges: a group of :attr:`out_groups` or :attr:`in_groups` of the stage.
            stage: the stage.
            microbatch: its micro-batch.

        Returns:
            (edge, index of the message on it, what it carries, whether the edge is local) in the
            order of the units.
        """
        key = edges[0].source, edges[0].target, stage, microbatch
        if key not in self._messages:
            found = [
                (edge, index, self.parts[edge.source, edge.target][index], self.is_local(edge))
                for edge in edges
                for index in self._indices.get((edge.source, edge.target, stage, microbatch), ())
            ]
            self._messages[key] = tuple(sorted(found, key=lambda item: item[2].start))
        return self._messages[key]

    @cached_property
    def _messages(
        self,
    ) -> dict[tuple[int, int, int, int], tuple[tuple[StageEdge, int, Part, bool], ...]]:
        """What :meth:`messages` has found: a program is run many times."""
        return {}

    def num_units(self, action: Action) -> int:
        """Units that an action works on or carries; 0 of a reduction.

        >>> from lightning_gpp.graph import StageEdge
        >>> from lightning_gpp.schedule import ONE_F_ONE_B
        >>> edges = (StageEdge(0, 1, ("x",)),)
        >>> program = Program(ONE_F_ONE_B, 4, (0, 1), multiples=(1, 4), edges=edges, actions=())
        >>> [program.num_units(Action.parse(text)) for text in ("0F3", "1F0", "1RF2<0")]
        [1, 4, 1]
        """
        if action.kind.is_compute:
            return self.multiple(action.stage)
        if action.peer is None:
            return 0
        source, target, is_gradient, index = action.message
        return self.parts[(target, source) if is_gradient else (source, target)][index].num_units

    def device_actions(self, device: int) -> tuple[Action, ...]:
        """The actions of a device; none of one that stays idle."""
        return self.actions[device] if device < len(self.actions) else ()

    def before_update(self, device: int) -> tuple[Action, ...]:
        """A device's actions before the update that ends the program; all if there is none."""
        actions = self.device_actions(device)
        ends = bool(actions) and actions[-1].kind is Kind.STEP
        return actions[:-1] if ends else actions

    @property
    def has_turn(self) -> bool:
        """Whether the user's step comes once, between all forwards and all backwards."""
        return self.has_backward and self.schedule.forwards_first

    def around_turn(self, device: int) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
        """A device's actions before the turn, and after it up to the update that ends the program.

        All comes before where there is no turn.
        """
        actions = self.before_update(device)
        turn = len(self.forward_half(device)) if self.has_turn else len(actions)
        return actions[:turn], actions[turn:]

    def forward_half(self, device: int) -> tuple[Action, ...]:
        """A device's actions before the user's step, in programs with two halves: its forwards.

        Together the forward halves of all devices are the program of the same mini-batch without
        backwards: they run to their end without any backward half.

        Args:
            device: the device.

        >>> from lightning_gpp.schedule import GPIPE
        >>> devices, actions = (0,), ((Action.parse("0F0"), Action.parse("0B0")),)
        >>> program = Program(GPIPE, 1, devices, multiples=(1,), edges=(), actions=actions)
        >>> [str(action) for action in program.forward_half(0)]
        ['0F0']
        """
        return self._forward_halves[device] if device < len(self.actions) else ()

    @cached_property
    def _forward_halves(self) -> tuple[tuple[Action, ...], ...]:
        """Forwards and their messages, which come first, of every device."""
        return tuple(
            tuple(itertools.takewhile(lambda action: action.kind.is_forward, actions))
            for actions in self.actions
        )
