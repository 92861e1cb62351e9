"""The stage graph of a plan, with the stages and edges that the pipeline itself adds.

And the checks of a plan against the model and the devices, before anything runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lightning_gpp.graph import FEED, ModelGraph, StageEdge, StageGraph, stage_graph
from lightning_gpp.graph.relays import relayed
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.units import output_makers, state_holders
from lightning_gpp.schedule import FORWARD_ONLY, Program, build_program, find_schedule
from lightning_gpp.schedule.schedules import Schedule


@dataclass(frozen=True)
class PlanGraph:
    """The stages of a plan, as the pipeline runs them.

    Where the last stage is not on the device of the loss alone, a stage without operators follows
    it there: outputs come together there.

    Attributes:
        stages: the stage graph, the stage of the loss included.
        devices: devices of every stage.
        shares: smallest micro-batches that each replica of every stage takes at a time.
        order_pace: that of the plan.
    """

    stages: StageGraph
    devices: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[int, ...], ...]
    order_pace: float | None = None

    @cached_property
    def multiples(self) -> tuple[int, ...]:
        """Smallest micro-batches that every stage, all replicas together, takes at a time."""
        return tuple(map(sum, self.shares))

    @property
    def units_at_a_time(self) -> int:
        """The number of smallest micro-batches of a mini-batch is a multiple of this."""
        return math.lcm(*self.multiples)

    @property
    def is_uneven(self) -> bool:
        """Whether replicas of a stage take unequal shares."""
        return any(len(set(shares)) > 1 for shares in self.shares)

    @property
    def replicas_at_a_time(self) -> int:
        """With a multiple of this many all replicas get equally many, one at a time."""
        return math.lcm(*map(len, self.devices))

    @cached_property
    def own_parameters(self) -> Mapping[int, tuple[str, ...]]:
        """Stage -> the parameters that no other stage reads, in the order of the operators."""
        found: dict[int, list[str]] = {stage: [] for stage in range(self.stages.num_stages)}
        for name, readers in self.stages.parameter_readers:
            if len(readers) == 1:
                found[readers[0]].append(name)
        return {stage: tuple(names) for stage, names in found.items()}

    def replica_multiples(self, stage: int) -> tuple[int, ...]:
        """Smallest micro-batches of every replica; the feed goes at the pace of the loss."""
        return (sum(self.shares[-1]),) if stage == FEED else self.shares[stage]

    def with_needs(self, needs: frozenset[str]) -> PlanGraph:
        """The same where these arguments of the forward, and no others, need a gradient."""
        edges = tuple(
            edge
            if edge.source != FEED
            else replace(edge, has_backward=not needs.isdisjoint(edge.values))
            for edge in self.stages.edges
        )
        return replace(self, stages=replace(self.stages, edges=edges))

    def program(
        self, num_microbatches: int, *, schedule: str = "1f1b", check: bool = True
    ) -> Program:
        """The program of a mini-batch that trains, or of several in a row.

        Args:
            num_microbatches: smallest micro-batches of the mini-batch; mini-batches of one
                micro-batch each where the schedule does not drain between them. Nothing goes back
                to the feed then, whose user's step is mini-batches ahead.
            schedule: name of the schedule.
            check: validate the program.

        Raises:
            ValueError: the number of micro-batches or the schedule does not fit the plan.
        """
        found, placed = find_schedule(schedule), self
        if not found.flushes:
            self.check_updates()
            placed = self.with_needs(frozenset())
        return placed._built(num_microbatches, found, shares=self.shares, check=check)

    def _built(self, num_microbatches: int, schedule: str | Schedule, **others: Any) -> Program:
        """A program of the stages, on their devices if no others are given."""
        how = {"devices": self.devices, "order_pace": self.order_pace} | others
        return build_program(
            self.stages, num_microbatches=num_microbatches, schedule=schedule, **how
        )

    def check_updates(self) -> None:
        """Raises ValueError where stages share parameters, which need one update for all."""
        for name, readers in self.stages.shared_parameters:
            raise ValueError(
                f"a pipeline that does not drain cannot share {name!r} between stages "
                f"{', '.join(map(str, readers))}, which are at different mini-batches when they "
                "update it; put what uses it into one stage (plan=...), or use schedule='gpipe'"
            )

    def small_program(self, num_microbatches: int, *, schedule: str = "1f1b") -> Program:
        """The program of a mini-batch with fewer samples than the stages take at a time.

        Every stage takes one smallest micro-batch at a time, on the device of its first replica;
        the other replicas take part in the sums of gradients.

        Args:
            num_microbatches: smallest micro-batches of the mini-batch.
            schedule: name of the schedule.
        """
        first = [home[0] for home in self.devices]
        return self._built(num_microbatches, schedule, devices=first, holders=self.devices)

    def forward_program(self, num_microbatches: int) -> Program:
        """The program of a batch that is only evaluated.

        Nothing is kept for backwards, so there is nothing to gain from more than one micro-batch
        at a time. Replicas take them in turn; where these do not go round, the first ones do all.
        Unequal replicas take their shares, as when they train.
        """
        if self.is_uneven and num_microbatches % self.units_at_a_time == 0:
            return self.trial_program(num_microbatches)
        goes_round = not self.is_uneven and num_microbatches % self.replicas_at_a_time == 0
        homes = self.devices if goes_round else [home[:1] for home in self.devices]
        return self._built(num_microbatches, FORWARD_ONLY, devices=homes)

    def trial_program(self, num_microbatches: int) -> Program:
        """The forwards alone of a mini-batch that trains, cut as :meth:`program` cuts it.

        Args:
            num_microbatches: smallest micro-batches of the mini-batch.
        """
        return self._built(num_microbatches, FORWARD_ONLY, shares=self.shares)


def plan_graph(plan: Plan, graph: ModelGraph, loss_device: int | None = None) -> PlanGraph:
    """The stage graph of a plan.

    Args:
        plan: the plan.
        graph: the model.
        loss_device: where the loss is; by default where the plan has it.

    Raises:
        ValueError: the plan does not fit the model.
    """
    operators = list(plan.stage_operators)
    devices = [stage.devices for stage in plan.stages]
    shares = [stage.replica_multiples for stage in plan.stages]
    last = plan.stages[-1]
    home = (plan.device_of_loss if loss_device is None else loss_device,)
    if last.devices != home:
        operators.append(())
        devices.append(home)
        shares.append((last.microbatch_multiple,))
    homes = list(zip(devices, shares, strict=True))
    stages = relayed(stage_graph(graph, operators), graph, homes)
    if plan.is_chain:
        stages = chained(stages)
    return PlanGraph(stages, tuple(devices), tuple(shares), plan.order_pace)


def chained(stages: StageGraph) -> StageGraph:
    """The stage graph with an edge from every stage to the next, empty where there was none.

    >>> [(edge.source, edge.target) for edge in chained(StageGraph(3, ())).edges]
    [(0, 1), (1, 2)]
    """
    edges = dict(stages.edge)
    for source in range(stages.num_stages - 1):
        pair = source, source + 1
        # Backwards wait for each other too, also where the data needs no gradient.
        edges[pair] = replace(edges.get(pair, StageEdge(*pair, values=())), has_backward=True)
    return replace(stages, edges=tuple(edges[pair] for pair in sorted(edges)))


def validate_plan(
    plan: Plan, graph: ModelGraph, num_devices: int, *, cuts: bool = True
) -> PlanGraph:
    """Checks that a plan can run.

    - Every operator is in exactly one stage, and stages are convex and in topological order.
    - Operators that change the same module state are in one stage, without replicas and without
      recomputation.
    - The last stage makes an output of the model, if an operator does.
    - The devices of the stages exist.
    - Along edges one micro-batch multiple divides the other, and where the two sides (or their
      replicas) take different numbers of samples, everything that crosses can be split by samples.

    Args:
        plan: the plan.
        graph: the model.
        num_devices: how many devices there are.
        cuts: whether batches are cut; one in one piece takes the first replica of every stage.

    Returns:
        The stages as they run.

    Raises:
        ValueError: a check fails; the text says what to change.
    """
    _check_devices(plan, num_devices)
    placed = plan_graph(plan, graph)
    _check_state(plan, graph)
    _check_last_stage(plan, graph)
    for edge in placed.stages.edges:
        _check_multiples(placed, edge)
    if cuts:
        check_cuts(placed, graph)
    return placed


def check_cuts(placed: PlanGraph, graph: ModelGraph) -> None:
    """Checks that values between stages can be cut wherever their two sides take other samples.

    Args:
        placed: the stages as they run.
        graph: the model.

    Raises:
        ValueError: a value cannot be cut; the text says what to change.
    """
    for edge in placed.stages.edges:
        _check_cut(placed, graph, edge)


def _check_devices(plan: Plan, num_devices: int) -> None:
    for stage in plan.stages:
        if wrong := [device for device in stage.devices if not 0 <= device < num_devices]:
            raise ValueError(
                f"stage {stage.id} is on device {wrong[0]}, but there are {num_devices} devices "
                f"(0 … {num_devices - 1}); change the plan or the number of devices"
            )
    if not 0 <= plan.device_of_loss < num_devices:
        raise ValueError(
            f"the loss is on device {plan.device_of_loss}, but there are {num_devices} devices "
            f"(0 … {num_devices - 1}); change loss_device or the number of devices"
        )


def _check_state(plan: Plan, graph: ModelGraph) -> None:
    stage_of = {name: stage.id for stage in plan.stages for name in stage.operators}
    for state, operators in state_holders(graph).items():
        stages = sorted({stage_of[name] for name in operators})
        if len(stages) > 1:
            raise ValueError(
                f"operators {', '.join(operators)} all change {state!r}, but are in stages "
                f"{stages}; put them in one stage"
            )
        _check_changes(plan.stages[stages[0]], operators[0], state)


def _check_changes(stage: Stage, operator: str, state: str) -> None:
    """What a forward changes (running statistics) has to change once per micro-batch, in order."""
    if len(stage.devices) > 1:
        raise ValueError(
            f"stage {stage.id} has {len(stage.devices)} replicas, but its operator {operator!r} "
            f"changes {state!r}, which replicas would change differently; give the stage one "
            "device, or put the operator into a stage of its own"
        )
    if stage.recompute:
        raise ValueError(
            f"stage {stage.id} recomputes its forward, but its operator {operator!r} changes "
            f"{state!r} in every forward, so twice; set recompute to false, or put the operator "
            "into a stage of its own"
        )


def _check_last_stage(plan: Plan, graph: ModelGraph) -> None:
    makers = output_makers(graph)
    last = plan.stages[-1]
    if makers and not set(makers) & set(last.operators):
        raise ValueError(
            f"the last stage ({last.id}) makes no output of the model, but the loss is computed "
            f"there; put one of {', '.join(makers)} into it"
        )


def _check_multiples(placed: PlanGraph, edge: StageEdge) -> None:
    if edge.source == FEED:
        return
    source, target = placed.multiples[edge.source], placed.multiples[edge.target]
    if max(source, target) % min(source, target):
        raise ValueError(
            f"{_between(placed, edge)}: the microbatch_multiple of one of them must divide that of "
            "the other"
        )


def _check_cut(placed: PlanGraph, graph: ModelGraph, edge: StageEdge) -> None:
    source, target = (placed.replica_multiples(end) for end in (edge.source, edge.target))
    if source == target or len({*source, *target}) == 1:
        return
    for name in edge.values:
        if not graph.values[name].is_cuttable:
            raise ValueError(
                f"{name!r} goes from {_between(placed, edge)}, but cannot be split or joined by "
                "samples; let both take the same samples: the same "
                "microbatch_multiple and as many devices"
            )


def _between(placed: PlanGraph, edge: StageEdge) -> str:
    """Both ends of an edge, with the smallest micro-batches that their replicas take."""
    source, target = (list(placed.replica_multiples(e)) for e in (edge.source, edge.target))
    start = "the feed" if edge.source == FEED else f"stage {edge.source}"
    return f"{start} (takes {source}) to stage {edge.target} (takes {target})"
