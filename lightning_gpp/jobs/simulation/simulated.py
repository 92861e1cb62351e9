"""A case and what its simulation says, as the job ``simulate`` shows it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from lightning_gpp.planner import PlanEvaluation, evaluate_plan
from lightning_gpp.simulate import Timeline, plan_stages, predicted_timeline
from lightning_gpp.simulate.critical_path import CriticalPath, critical_path
from lightning_gpp.simulate.simulation import Simulation
from lightning_gpp.simulate.usage import Usage, usage
from lightning_gpp.simulate.what_if.plan_case import PlanCase

MOST_SHOWN = 12
"""Mini-batches that overlap in a picture."""


@dataclass(frozen=True)
class Simulated:
    """A plan in some world, and its simulation.

    Attributes:
        case: the plan, the cluster, how it is run.
        name: of the world.
        notes: what to know of how it is run.
    """

    case: PlanCase
    name: str = "as it is"
    notes: tuple[str, ...] = ()

    @cached_property
    def simulation(self) -> Simulation:
        """A step, or several where the input is read ahead."""
        return self.case.simulate()

    @cached_property
    def usage(self) -> Usage:
        """How busy devices and channels are."""
        return usage(self.simulation)

    @cached_property
    def path(self) -> CriticalPath:
        """What the end of the step waits for."""
        return critical_path(self.simulation)

    @cached_property
    def evaluation(self) -> PlanEvaluation:
        """What planners judge the plan by."""
        return evaluate_plan(self.case.plan, self.case.request)

    @property
    def step_s(self) -> float:
        """Seconds of a step; of several without draining their mean."""
        return self.simulation.minibatch_s

    @property
    def num_steps(self) -> int:
        """Steps that were simulated in a row."""
        return self.case.num_steps

    @property
    def peak_memory_bytes(self) -> float:
        """On the fullest device."""
        return max(device.peak_bytes for device in self.usage.devices)

    @property
    def samples_per_s(self) -> float:
        """Throughput."""
        return self.case.samples / self.simulation.step_s

    def shortened(self) -> Simulated:
        """With as many of the mini-batches that overlap as a picture can show."""
        case, count = self.case, self.case.request.num_minibatches
        if count <= MOST_SHOWN:
            return self
        request = replace(
            case.request,
            minibatch_size=case.request.minibatch_size // count * MOST_SHOWN,
            num_microbatches=MOST_SHOWN,
        )
        return replace(self, case=replace(case, request=request))

    def timeline(self, name: str = "") -> Timeline:
        """The simulation as a timeline that can be drawn.

        Args:
            name: what it is called where several are shown.
        """
        program, request = self.simulation.program, self.case.request
        ranks = range(len(program.actions))
        stages = plan_stages(program, self.case.plan, request.graph, ranks)
        return predicted_timeline(self.simulation, stages=stages, name=name)
