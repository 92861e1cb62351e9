"""The pipeline of a plan, ready to be played: its stages, messages and orders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_gpp.graph import FEED
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan import Plan
from lightning_gpp.planner.plan_graph import PlanGraph, plan_graph
from lightning_gpp.planner.timing import TimedStage, Timing, play
from lightning_gpp.planner.traffic import Traffic, plan_traffic
from lightning_gpp.schedule import Action, Kind, Steps, build_program, dry_run, schedule_steps


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


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """One step of a plan.

    Attributes:
        plan: the plan.
        graph: its stages, that of the loss included.
        traffic: their messages.
        steps: forwards and backwards of every stage in order.
        num_microbatches: smallest micro-batches of the mini-batch.
        schedule: name of the schedule.
    """

    plan: Plan
    graph: PlanGraph
    traffic: Traffic
    steps: Mapping[int, Steps]
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
        timed = [
            TimedStage(self.steps[number], found.forward_s, found.backward_s, found.reduce_s)
            for number, found in enumerate(stages)
        ]
        for stage in range(len(timed), self.graph.stages.num_stages):  # of the loss
            timed.append(TimedStage(self.steps[stage], 0.0, 0.0))
        feeds = self.num_microbatches // self.graph.multiples[-1]
        return play(timed, self.traffic.forward, self.traffic.backward, feeds, record=record)

    @property
    def _shares_devices(self) -> bool:
        devices = [device for stage in self.plan.stages for device in stage.devices]
        return len(set(devices)) < len(devices)

    def _dry_run(self, stages: Sequence[StageSeconds]) -> Timing:
        """The same where a device holds several stages, whose orders the program merges."""
        if any(stage.num_replicas > 1 for stage in self.plan.stages):
            raise ValueError("stages with replicas cannot share devices with other stages yet")
        program = build_program(
            self.graph.stages,
            devices=[devices[0] for devices in self.graph.devices],
            num_microbatches=self.num_microbatches,
            schedule=self.schedule,
            multiples=self.graph.multiples,
            check=False,
        )
        found = dry_run(program, _durations(self.traffic, stages))
        own = {action: at_s for action, at_s in found.start_s.items() if action.stage != FEED}
        starts: dict[int, list[float]] = {stage: [] for stage in self.steps}
        for action, at_s in sorted(own.items(), key=lambda item: item[1]):
            if action.kind in (Kind.FORWARD, Kind.BACKWARD):
                starts[action.stage].append(at_s)
        ends = tuple(starts[number][-1] + stage.backward_s for number, stage in enumerate(stages))
        return Timing(found.step_s, ends, tuple(tuple(starts[stage]) for stage in sorted(starts)))


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
        steps=schedule_steps(request.schedule, graph.stages, count, graph.multiples),
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


def _durations(traffic: Traffic, stages: Sequence[StageSeconds]) -> Callable[[Action], float]:
    def action_s(action: Action) -> float:
        if action.kind is Kind.SEND_FORWARD:
            return traffic.forward[action.stage, action.peer or 0].message_s
        if action.kind is Kind.SEND_BACKWARD:
            assert action.peer is not None
            return traffic.backward[action.peer, action.stage].message_s
        if action.stage == FEED or not action.kind.is_compute:
            return 0.0
        found = stages[action.stage]
        return found.forward_s if action.kind is Kind.FORWARD else found.backward_s

    return action_s
