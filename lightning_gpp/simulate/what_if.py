"""Simulates changes: other devices, other links, data parallelism.

Every change is simulated anew, so that it shows what becomes the bottleneck after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from lightning_gpp.cluster import Link
from lightning_gpp.common.checks import LARGEST, is_number
from lightning_gpp.cost import Costs
from lightning_gpp.planner import Plan, PlanEvaluation, PlanRequest, evaluate_plan
from lightning_gpp.planner.plan.by_rank import in_plan_order
from lightning_gpp.simulate.plan_costs import program_costs, simulate_plan
from lightning_gpp.simulate.program_costs import StepCosts
from lightning_gpp.simulate.simulation import Simulation
from lightning_gpp.simulate.ssgd import Ssgd, model_layers
from lightning_gpp.simulate.timeline.predicted import predicted_timeline
from lightning_gpp.simulate.timeline.timeline import Timeline
from lightning_gpp.simulate.timeline.words import plan_stages


@dataclass(frozen=True)
class Case:
    """A plan on a cluster, to be changed.

    Attributes:
        plan: the stages.
        request: the question that it answers.
        step: what a step costs beside compute and messages.
    """

    plan: Plan
    request: PlanRequest
    step: StepCosts = field(default_factory=StepCosts)

    @cached_property
    def simulation(self) -> Simulation:
        """A step."""
        costs = program_costs(self.plan, self.request, step=self.step)
        return simulate_plan(self.plan, self.request, costs)

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of the simulated step."""
        program = self.simulation.program
        ranks = range(len(program.actions))
        stages = plan_stages(program, self.plan, self.request.graph, ranks)
        return predicted_timeline(self.simulation, stages=stages)

    @cached_property
    def evaluation(self) -> PlanEvaluation:
        """The planners' evaluation of the plan."""
        return evaluate_plan(self.plan, self.request)

    @property
    def step_s(self) -> float:
        """Seconds of a step; of several in a row their mean."""
        return self.simulation.minibatch_s

    @property
    def samples_per_s(self) -> float:
        """Throughput."""
        return self.request.minibatch_size / self.request.num_minibatches / self.step_s

    def changed(self, factors: Mapping[str, float]) -> Case:
        """The same plan in a changed world.

        Args:
            factors: name in :data:`CHANGES` -> factor; 1 changes nothing.

        Raises:
            ValueError: a factor makes no sense.
        """
        found = self
        for name, factor in factors.items():
            if not is_number(factor) or factor <= 0:
                raise ValueError(
                    f"what_if.{name} is a factor above 0 (1 changes nothing), got {factor!r}"
                )
            if factor != 1:
                found = CHANGES[name](found, factor)
        return found

    def ssgd(self, count: int, variant: str) -> Ssgd:
        """Pure data parallelism of the same model on the first devices, each with its own input."""
        part = 1 / self.request.num_devices
        request = replace(self.request, cluster=in_plan_order(self.request.cluster).first(count))
        layers = model_layers(request, self.request.minibatch_size * part)
        step = self.step.of_part(part, count)
        return Ssgd(layers, request.cluster, variant, step)


def _compute(case: Case, factor: float) -> Case:
    costs = Costs(tuple(profile.slower(1 / factor) for profile in case.request.costs.profiles))
    optimizer_s = {device: s / factor for device, s in case.step.optimizer_s.items()}
    names = ("feed_s", "loss_s", "loss_backward_s", "turn_s")
    faster = {name: getattr(case.step, name) / factor for name in names}
    step = replace(case.step, optimizer_s=optimizer_s, **faster)
    return replace(case, request=replace(case.request, costs=costs), step=step)


def _links(case: Case, bandwidth: float = 1.0, latency: float = 1.0) -> Case:
    def changed(link: Link) -> Link:
        bytes_per_s = min(LARGEST, link.bandwidth_bytes_per_s * bandwidth)
        return replace(link, bandwidth_bytes_per_s=bytes_per_s, latency_s=link.latency_s * latency)

    cluster = case.request.cluster
    cluster = replace(
        cluster,
        host_link=changed(cluster.host_link),
        rack_link=cluster.rack_link and changed(cluster.rack_link),
        spine_link=cluster.spine_link and changed(cluster.spine_link),
    )
    return replace(case, request=replace(case.request, cluster=cluster))


CHANGES: Mapping[str, Callable[[Case, float], Case]] = {
    "compute": _compute,
    "bandwidth": lambda case, factor: _links(case, bandwidth=factor),
    "latency": lambda case, factor: _links(case, latency=factor),
}
"""What can be changed by a factor: speed of devices and links."""


LEVERS: Mapping[str, Mapping[str, float]] = {
    "twice the bandwidth": {"bandwidth": 2.0},
    "half the latency": {"latency": 0.5},
    "devices twice as fast": {"compute": 2.0},
}
"""Changes that one might pay for."""


def levers(case: Case) -> list[dict[str, str | float]]:
    """The gain of each change, the largest first."""
    found: list[dict[str, str | float]] = []
    for name, factors in LEVERS.items():
        after = case.changed(factors)
        rate = after.samples_per_s
        gain = {"gain": rate / case.samples_per_s - 1}
        found.append({"name": name, "step_s": after.step_s, "samples_per_s": rate, **gain})
    return sorted(found, key=lambda lever: lever["gain"], reverse=True)
