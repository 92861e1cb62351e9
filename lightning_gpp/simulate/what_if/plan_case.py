"""A plan as it trains: what can be simulated, and changed to see what it would buy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightning_gpp.cluster import AllReduce
from lightning_gpp.planner import PLANNERS, Plan, PlanRequest
from lightning_gpp.planner.plan.by_rank import in_plan_order
from lightning_gpp.planner.plan_to_run import PlanQuestion, plan_to_run
from lightning_gpp.simulate.plan_costs import Overlap, program_costs, simulate_plan
from lightning_gpp.simulate.program_costs import ProgramCosts, StepCosts
from lightning_gpp.simulate.simulation import Simulation
from lightning_gpp.simulate.what_if.changes import WhatIf, has_input
from lightning_gpp.simulate.what_if.grown_cluster import twice

STEPS = 3
"""Steps in a row that show what reading ahead gives; the last of them is the steady state."""

BETTER_SUMS: Mapping[Overlap, tuple[Overlap, ...]] = {
    "at_end": ("wait_free", "merged", "optimal"),
    "one_at_end": ("merged", "optimal"),
    "wait_free": ("merged", "optimal"),
    "buckets": ("merged", "optimal"),
    "merged": ("optimal",),
    "optimal": (),
}
"""What may hide sums of gradients better."""


@dataclass(frozen=True)
class RunOptions:
    """How a step is run, beside its plan.

    Attributes:
        step: what it costs beside compute and messages.
        overlap: how the gradients of replicas are cut into sums.
        all_reduce: how they are summed.
        prefetch: whether the input of the next step is read while one runs.
    """

    step: StepCosts = field(default_factory=StepCosts)
    overlap: Overlap = "buckets"
    all_reduce: AllReduce = "ring"
    prefetch: bool = False


@dataclass(frozen=True)
class PlanCase:
    """A plan on a cluster.

    Attributes:
        plan: the stages.
        request: the question that it answers: the model, the cluster, the costs.
        run: how it is run.
        size_factor: of the bytes of messages and sums.
        planner: who is asked for a plan on more devices.
        keeps_schedule: whether such a plan runs with the schedule of this one, too; otherwise with
            the one that fits into memory.
    """

    plan: Plan
    request: PlanRequest
    run: RunOptions = field(default_factory=RunOptions)
    size_factor: float = 1.0
    planner: str = "graphpipe"
    keeps_schedule: bool = True

    @property
    def asked_schedule(self) -> str | None:
        """The schedule of other plans; None leaves it to what fits into memory."""
        return self.request.schedule if self.keeps_schedule else None

    @property
    def samples(self) -> float:
        """Samples of a step, or of all mini-batches that overlap."""
        return self.request.minibatch_size

    @property
    def has_input(self) -> bool:
        """Whether reading and copying the input takes time."""
        return has_input(self.run.step)

    @property
    def has_replicas(self) -> bool:
        """Whether gradients are summed over replicas."""
        return any(stage.num_replicas > 1 for stage in self.plan.stages)

    @property
    def num_steps(self) -> int:
        """Steps that are simulated in a row."""
        return STEPS if self.run.prefetch and self.has_input else 1

    def costs(self) -> ProgramCosts:
        """What its program costs."""
        run = self.run
        costs = program_costs(
            self.plan, self.request, overlap=run.overlap, all_reduce=run.all_reduce, step=run.step
        )
        return WhatIf(bytes=self.size_factor).messages(costs)

    def simulate(self) -> Simulation:
        """A step, or the last of several where the input is read ahead."""
        return simulate_plan(
            self.plan,
            self.request,
            self.costs(),
            num_steps=self.num_steps,
            prefetch=self.run.prefetch,
        )

    def changed(self, what_if: WhatIf) -> PlanCase:
        """The same plan in a changed world.

        Raises:
            ValueError: there is no such device or operator.
        """
        return replace(
            self,
            request=what_if.request(self.request),
            run=replace(self.run, step=what_if.step(self.run.step)),
            size_factor=self.size_factor * what_if.bytes,
        )

    def better_overlap(self) -> Mapping[str, PlanCase]:
        """Input that is read ahead, and sums that hide better; no more than there is to hide."""
        found = {}
        if self.has_input and not self.run.prefetch:
            found["input read ahead"] = replace(self, run=replace(self.run, prefetch=True))
        for overlap in BETTER_SUMS[self.run.overlap] if self.has_replicas else ():
            run = replace(self.run, overlap=overlap)
            found[f"sums of gradients: {overlap}"] = replace(self, run=run)
        return found

    def twice_the_devices(self) -> PlanCase:
        """The planner's plan for twice the devices, and mini-batches of twice the size.

        Raises:
            ValueError: no planner made the plan, or it finds none.
        """
        request = replace(
            self.request,
            cluster=twice(in_plan_order(self.request.cluster)),
            minibatch_size=2 * self.request.minibatch_size,
        )
        return self.replanned(request)

    def replanned(self, request: PlanRequest) -> PlanCase:
        """The planner's plan of another question, run likewise.

        Raises:
            ValueError: no planner made the plan, or it finds none.
        """
        if self.planner not in PLANNERS:
            raise ValueError(f"no planner made the plan ({self.planner!r}), so none can be asked")
        found = plan_to_run(PlanQuestion(request, self.planner, self.asked_schedule))
        run = replace(self.run, step=_step_of(self.run.step, self.request, found.request))
        return replace(self, plan=found.plan, request=found.request, run=run)


def _step_of(step: StepCosts, before: PlanRequest, after: PlanRequest) -> StepCosts:
    """What a step costs with other mini-batches and devices.

    Input, and the user's step where it sees a whole mini-batch, go with the number of samples.
    """
    part = after.minibatch_size / before.minibatch_size
    return replace(
        step,
        data_s=step.data_s * part,
        input_bytes=step.input_bytes * part,
        turn_s=step.turn_s * part,
        optimizer_s=_on_all(step.optimizer_s, after.num_devices),
        finish_s=_on_all(step.finish_s, after.num_devices),
    )


def _on_all(seconds: Mapping[int, float], num_devices: int) -> dict[int, float]:
    """The slowest device's seconds on all."""
    return dict.fromkeys(range(num_devices), max(seconds.values())) if seconds else {}
