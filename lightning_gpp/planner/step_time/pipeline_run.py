"""The pipeline of a plan, ready to be played: its stages, messages and orders."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_gpp.engine.play import Played, play
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan.plan import Plan, Stage
from lightning_gpp.planner.plan.plan_graph import PlanGraph, plan_graph
from lightning_gpp.planner.step_time.gradients import NO_SUMS, StageSums, stage_sums
from lightning_gpp.planner.step_time.stage_costs import replica_computes
from lightning_gpp.planner.step_time.step_work import StepWork
from lightning_gpp.schedule import Steps, find_schedule


@dataclass(frozen=True, slots=True)
class Timing:
    """What playing the orders gave.

    Attributes:
        step_s: seconds until everything is done.
        start_s: when every step of every replica of every stage starts.
    """

    step_s: float
    start_s: tuple[tuple[tuple[float, ...], ...], ...]


@dataclass(frozen=True)
class PipelineRun:
    """One step of a plan.

    Attributes:
        request: what it is a plan of.
        plan: the plan.
        graph: its stages, that of the loss included.
        num_microbatches: smallest micro-batches of the mini-batch.
    """

    request: PlanRequest
    plan: Plan
    graph: PlanGraph
    num_microbatches: int

    def step_s(self, at_most_s: float = math.inf) -> float:
        """Seconds of the step; infinite where it takes longer than is of interest.

        Args:
            at_most_s: the longest step that is.

        Raises:
            ValueError: devices wait for each other for ever.
        """
        played = self._play(at_most_s)
        return math.inf if played is None else played.step_s

    def play(self) -> Timing:
        """Plays the orders of all devices: what a step takes, and when everything begins.

        Raises:
            ValueError: devices wait for each other for ever.
        """
        numbered = self._numbered
        played = self._play()
        assert played is not None  # no step is too long
        starts_s = []
        for stage, steps in self.steps.items():
            first, count = numbered.first[stage], numbered.shares[stage].num_microbatches
            replicas = range(numbered.shares[stage].num_replicas)
            numbers = [step if step >= 0 else count + ~step for step in steps]
            starts_s.append(
                tuple(
                    tuple(played.start_s[first + 2 * count * replica + own] for own in numbers)
                    for replica in replicas
                )
            )
        return Timing(played.step_s, tuple(starts_s))

    @cached_property
    def replica_s(self) -> Sequence[Sequence[tuple[float, float]]]:
        """Of every stage of the plan, seconds of a forward and a backward of every replica."""
        unit_size = self.request.minibatch_size / self.num_microbatches
        return [
            [
                (one.forward_s, one.backward_s)
                for one in replica_computes(self.request, stage, unit_size)
            ]
            for stage in self.plan.stages
        ]

    @cached_property
    def _numbered(self) -> StepWork:
        return StepWork(
            self.request, self.graph, self.plan.num_stages, self.num_microbatches, self.steps
        )

    def _play(self, at_most_s: float = math.inf) -> Played | None:
        buckets = [self.sums(stage).buckets for stage in self.plan.stages]
        played = play(self._numbered.work(self.replica_s, buckets), at_most_s)
        if played is not None and played.stuck:
            raise ValueError(
                f"devices {sorted(played.stuck)} wait for each other: the orders deadlock"
            )
        return played

    def busiest_s(self) -> float:
        """Seconds that the busiest device computes; no step is shorter."""
        busy_s: dict[int, float] = {}
        for stage, replicas in zip(self.plan.stages, self.replica_s):
            count = self.num_microbatches // stage.microbatch_multiple
            for device, (forward_s, backward_s) in zip(stage.devices, replicas):
                busy_s[device] = busy_s.get(device, 0.0) + count * (forward_s + backward_s)
        return max(busy_s.values())

    def sent_s(self) -> Sequence[float]:
        """Of every stage, seconds that its busiest replica sends per micro-batch."""
        return self._numbered.sent_s()

    @cached_property
    def steps(self) -> Mapping[int, Steps]:
        """Forwards and backwards of every stage in order."""
        return find_schedule(self.request.schedule).orders(
            self.graph.stages, self.num_microbatches, self.graph.multiples
        )

    @cached_property
    def in_flight(self) -> Mapping[int, int]:
        """Micro-batches of every stage between forward and backward at the peak."""
        return find_schedule(self.request.schedule).peak_in_flight(
            self.graph.stages, self.num_microbatches, self.graph.multiples
        )

    def sums(self, stage: Stage) -> StageSums:
        """The sums of a stage's gradients over its replicas."""
        if stage.num_replicas == 1:
            return NO_SUMS
        unit_size = self.request.minibatch_size / self.num_microbatches
        return stage_sums(self.request, stage, unit_size, self.graph.own_parameters[stage.id])


def pipeline_run(plan: Plan, request: PlanRequest) -> PipelineRun:
    """The pipeline of a plan on the request's cluster.

    Raises:
        ValueError: the plan does not fit the model, or has no number of micro-batches.
    """
    count = num_microbatches(plan, request)
    graph = plan_graph(plan, request.graph)
    if request.num_minibatches > 1:
        graph = graph.with_needs(frozenset())
    return PipelineRun(request, plan, graph, count)


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
