"""What every planner gets and gives.

A planner is a pure function from a :class:`PlanRequest` to a plan: no clock, no random number, no
global. It lives in a file of its own and is listed by name in
:data:`lightning_gpp.planner.make_plan.PLANNERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_gpp.cluster import Cluster
from lightning_gpp.cost import ESTIMATED, Profile
from lightning_gpp.graph import ModelGraph
from lightning_gpp.planner.plan import Plan
from lightning_gpp.schedule.orders import check_schedule


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The question to a planner.

    Attributes:
        graph: the model.
        cluster: the devices to use, and their links.
        profile: what the operators cost, measured or estimated.
        num_microbatches: micro-batches of a mini-batch.
        schedule: name of the schedule that will run the plan.

    Raises:
        ValueError: there is no micro-batch, the schedule is unknown, or the profile lacks an
            operator.
    """

    graph: ModelGraph
    cluster: Cluster
    profile: Profile
    num_microbatches: int
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ValueError(f"num_microbatches must be at least 1, got {self.num_microbatches}")
        check_schedule(self.schedule)
        if missing := [o.name for o in self.graph if o.name not in self.profile.operators]:
            raise ValueError(
                f"the profile has no costs of {', '.join(missing[:5])}"
                f"{' …' if len(missing) > 5 else ''}; it must have been measured on this model "
                "graph: profile again"
            )

    @property
    def num_devices(self) -> int:
        """Number of devices to use."""
        return self.cluster.num_devices

    @property
    def is_estimated(self) -> bool:
        """Whether the costs are estimates."""
        return self.profile.device == ESTIMATED


Planner = Callable[[PlanRequest], Plan]
"""A planner."""
