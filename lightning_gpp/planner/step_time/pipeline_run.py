"""The pipeline of a plan, ready to be played: its stages, messages and orders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from lightning_gpp.graph import FEED
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.plan.plan_graph import PlanGraph, plan_graph
from lightning_gpp.planner.step_time.least_step import least_step_s
from lightning_gpp.planner.step_time.timing import TimedStage, Timing, play
from lightning_gpp.planner.step_time.traffic import Traffic, plan_traffic
from lightning_gpp.schedule import (
    Action,
    Kind,
    Program,
    Steps,
    dry_run,
    find_schedule,
)


class StageSeconds(Protocol):
    """What a stage takes for one of its micro-batches, and at the end of the step."""

    @property
    def forward_s(self) -> float:
        """Seconds of a forward."""

    @property
    def backward_s(self) -> float:
        """Seconds of a backward."""

    @property
    def reduce_s(self) -> float:
        """Seconds after its last backward."""


@dataclass(frozen=True)
class PipelineRun:
    """One step of a plan.

    Attributes:
        plan: the plan.
        graph: its stages, that of the loss included.
        traffic: their messages.
        num_microbatches: smallest micro-batches of the mini-batch.
        schedule: name of the schedule.
    """

    plan: Plan
    graph: PlanGraph
    traffic: Traffic
    num_microbatches: int
    schedule: str

    def play(self, stages: Sequence[StageSeconds], *, record: bool = False) -> Timing:
        """Plays the orders of the stages.

        Args:
            stages: what the plan's stages take.
            record: whether to note when each step starts.

        Raises:
            ValueError: stages wait for each other for ever.
        """
        if self._shares_devices:
            return self._dry_run(stages)
        forward, backward = self.traffic.forward, self.traffic.backward
        feeds = self.num_microbatches // self.graph.multiples[-1]
        orders = [self.steps[stage] for stage in range(self.graph.stages.num_stages)]
        return play(self._timed(stages), orders, forward, backward, feeds, record=record)

    def least_step_s(self, stages: Sequence[StageSeconds]) -> float:
        """Seconds that playing takes at least, found in no time (see :mod:`.least_step`).

        Args:
            stages: what the plan's stages take.
        """
        if self._shares_devices:
            return 0.0
        return least_step_s(self._timed(stages), self.traffic.forward, self.traffic.backward)

    @cached_property
    def steps(self) -> Mapping[int, Steps]:
        """Forwards and backwards of every stage in order."""
        return find_schedule(self.schedule).orders(
            self.graph.stages, self.num_microbatches, self.graph.multiples
        )

    @cached_property
    def in_flight(self) -> Mapping[int, int]:
        """Micro-batches of every stage between forward and backward at the peak."""
        return find_schedule(self.schedule).peak_in_flight(
            self.graph.stages, self.num_microbatches, self.graph.multiples
        )

    def _timed(self, stages: Sequence[StageSeconds]) -> list[TimedStage]:
        counts = [self.num_microbatches // multiple for multiple in self.graph.multiples]
        timed = [
            TimedStage(count, found.forward_s, found.backward_s, found.reduce_s)
            for count, found in zip(counts, stages)
        ]
        return timed + [TimedStage(count, 0.0, 0.0) for count in counts[len(timed) :]]  # the loss

    @cached_property
    def _shares_devices(self) -> bool:
        devices = [device for stage in self.plan.stages for device in stage.devices]
        return len(set(devices)) < len(devices)

    def _dry_run(self, stages: Sequence[StageSeconds]) -> Timing:
        """The same where a device holds several stages, whose orders the program merges.

        Replicas act on their own then; the starts are those of the first replica of each stage.
        """
        program = self.graph.program(self.num_microbatches, schedule=self.schedule, check=False)
        found = dry_run(program, self._durations(program, stages))
        starts: dict[int, list[float]] = {stage: [] for stage in self.steps}
        ends = [0.0] * self.graph.stages.num_stages
        for action, at_s in sorted(found.start_s.items(), key=lambda item: item[1]):
            replica = program.replica(action.stage)
            if not action.kind.is_compute or action.stage == FEED:
                continue
            if replica.index == 0:
                starts[replica.stage].append(at_s)
            if replica.stage < len(stages):
                taken_s = stages[replica.stage].backward_s + stages[replica.stage].reduce_s
                ends[replica.stage] = max(ends[replica.stage], at_s + taken_s)
        return Timing(
            found.step_s,
            tuple(ends[: len(stages)]),
            tuple(tuple(starts[stage]) for stage in sorted(starts)),
        )

    def _durations(
        self, program: Program, stages: Sequence[StageSeconds]
    ) -> Callable[[Action], float]:
        def action_s(action: Action) -> float:
            stage = program.replica(action.stage).stage
            if action.kind is Kind.REDUCE:
                reduced = program.reduce_group(action.microbatch).stage
                return 0.0 if reduced is None else stages[reduced].reduce_s
            if action.kind.is_send:
                return self._message_s(program, action)
            if stage == FEED or stage >= len(stages) or not action.kind.is_compute:
                return 0.0
            found = stages[stage]
            return found.forward_s if action.kind is Kind.FORWARD else found.backward_s

        return action_s

    def _message_s(self, program: Program, send: Action) -> float:
        """Seconds of the part of a message that goes from one replica to another."""
        assert send.peer is not None
        sender, receiver = (program.replica(stage) for stage in (send.stage, send.peer))
        if send.kind is Kind.SEND_FORWARD:
            messages = self.traffic.forward[sender.stage, receiver.stage]
        elif receiver.stage == FEED:
            return 0.0
        else:
            messages = self.traffic.backward[receiver.stage, sender.stage]
        units = min(self.graph.multiples[end.stage] for end in (sender, receiver))
        return messages.message_s * sender.count * program.num_units(send) / units


def pipeline_run(plan: Plan, request: PlanRequest) -> PipelineRun:
    """The pipeline of a plan on the request's cluster.

    Raises:
        ValueError: the plan does not fit the model, or has no number of micro-batches.
    """
    count = num_microbatches(plan, request)
    graph = plan_graph(plan, request.graph)
    return PipelineRun(
        plan,
        graph,
        traffic=plan_traffic(request, graph, request.minibatch_size / count),
        num_microbatches=count,
        schedule=request.schedule,
    )


def num_microbatches(plan: Plan, request: PlanRequest) -> int:
    """Smallest micro-batches of a mini-batch.

    Raises:
        ValueError: neither the plan nor the request has a number.
    """
    count = plan.num_microbatches or request.num_microbatches
    if count is None:
        raise ValueError(
            "the plan does not say how many micro-batches a mini-batch has; set its "
            "num_microbatches, or the one of the request"
        )
    return count
