"""The stage graph of a plan, with the stages and edges that the pipeline itself adds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_gpp.graph import FEED, ModelGraph, StageEdge, StageGraph, stage_graph
from lightning_gpp.graph.relays import relayed
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.schedule import Program, build_program, find_schedule
from lightning_gpp.schedule.path_lengths import PathLengths, path_lengths


@dataclass(frozen=True)
class PlanGraph:
    """The stages of a plan as the pipeline runs them.

    Where the last stage has replicas, a stage without operators follows it on the device of its
    first replica: the outputs of all replicas come together there, and the loss is computed there.

    Attributes:
        stages: the stage graph, the stage of the loss included.
        devices: devices of every stage.
        shares: smallest micro-batches that each replica of every stage takes at a time.
    """

    stages: StageGraph
    devices: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[int, ...], ...]

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

    @property
    def path_lengths(self) -> PathLengths:
        """The longest paths through the stages."""
        return path_lengths([max(shares) for shares in self.shares], self.stages.edges)

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
        found, stages = find_schedule(schedule), self.stages
        if not found.flushes:
            self.check_updates()
            stages = self.with_needs(frozenset()).stages
        return build_program(
            stages,
            devices=self.devices,
            num_microbatches=num_microbatches,
            num_minibatches=1 if found.flushes else num_microbatches,
            schedule=found,
            multiples=self.multiples,
            shares=self.shares,
            check=check,
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
        return build_program(
            self.stages,
            devices=[home[0] for home in self.devices],
            num_microbatches=num_microbatches,
            schedule=schedule,
            holders=self.devices,
        )

    def forward_program(self, num_microbatches: int) -> Program:
        """The program of a batch that is only evaluated.

        Nothing is kept for backwards, so there is nothing to gain from more than one micro-batch
        at a time. Replicas take them in turn; where these do not go round, the first ones do all.
        Unequal replicas take their shares, as when they train.
        """
        if self.is_uneven and num_microbatches % self.units_at_a_time == 0:
            return self.trial_program(num_microbatches)
        goes_round = not self.is_uneven and num_microbatches % self.replicas_at_a_time == 0
        return build_program(
            self.stages,
            devices=self.devices if goes_round else [home[0] for home in self.devices],
            num_microbatches=num_microbatches,
            multiples=[len(home) if goes_round else 1 for home in self.devices],
            forward_only=True,
        )

    def trial_program(self, num_microbatches: int) -> Program:
        """The forwards alone of a mini-batch that trains, cut as :meth:`program` cuts it.

        Args:
            num_microbatches: smallest micro-batches of the mini-batch.
        """
        return build_program(
            self.stages,
            devices=self.devices,
            num_microbatches=num_microbatches,
            multiples=self.multiples,
            shares=self.shares,
            forward_only=True,
        )


def plan_graph(plan: Plan, graph: ModelGraph) -> PlanGraph:
    """The stage graph of a plan.

    Raises:
        ValueError: the plan does not fit the model.
    """
    operators = list(plan.stage_operators)
    devices = [stage.devices for stage in plan.stages]
    shares = [stage.replica_multiples for stage in plan.stages]
    last = plan.stages[-1]
    if last.num_replicas > 1:
        operators.append(())
        devices.append(last.devices[:1])
        shares.append((last.microbatch_multiple,))
    homes = list(zip(devices, shares, strict=True))
    stages = relayed(stage_graph(graph, operators), graph, homes)
    if plan.is_chain:
        stages = chained(stages)
    return PlanGraph(stages, tuple(devices), tuple(shares))


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
