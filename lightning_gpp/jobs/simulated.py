"""A case and what its simulation says, as the job ``simulate`` shows it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lightning_gpp.jobs.simulation_use import StepUse, step_use
from lightning_gpp.planner import PlanEvaluation, evaluate_plan
from lightning_gpp.schedule import ScheduleError
from lightning_gpp.simulate import Timeline, predicted_timeline
from lightning_gpp.simulate.plan_case import PlanCase
from lightning_gpp.simulate.simulation import Simulation


@dataclass(frozen=True)
class Simulated:
    """A plan in some world, and its simulation.

    Attributes:
        case: the plan, the cluster, how it is run.
        name: of the world.
    """

    case: PlanCase
    name: str = "as it is"

    @cached_property
    def simulation(self) -> Simulation:
        """A step, or several where the input is read ahead.

        Raises:
            ValueError: devices wait for each other for ever; the text says where, and why.
        """
        try:
            return self.case.simulate()
        except ScheduleError as error:
            if self.case.run.sends == "buffered":
                raise
            raise ValueError(
                f"{error}; with sends=rendezvous a sender waits until its receiver asks. Training "
                "hands messages over and goes on: sends=buffered"
            ) from error

    @cached_property
    def use(self) -> StepUse:
        """What the step is made of."""
        return step_use(self.simulation)

    @cached_property
    def evaluation(self) -> PlanEvaluation:
        """What planners judge the plan by."""
        return evaluate_plan(self.case.plan, self.case.request)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.simulation.step_s

    @property
    def samples_per_s(self) -> float:
        """Throughput."""
        return self.case.samples / self.step_s

    def timeline(self) -> Timeline:
        """The simulation as a timeline that can be drawn."""
        return predicted_timeline(self.simulation)
