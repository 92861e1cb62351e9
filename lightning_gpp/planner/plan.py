"""A plan: which operators form which stage on which device.

Plans are plain data with a JSON form (:mod:`lightning_gpp.planner.plan_json`): they can be
printed, compared, edited by hand and given to the strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """A convex set of operators placed on one device (or one replica group).

    Attributes:
        id: position in topological order, from 0.
        operators: operator names, in topological order.
        devices: indices into the cluster's devices; more than one means data-parallel replicas.
        microbatch_multiple: how many of the plan's micro-batches the stage processes at a time
            (GraphPipe's per-stage micro-batch size, arXiv 2406.17145 section 5.3, in units of the
            smallest one).
    """

    id: int
    operators: tuple[str, ...]
    devices: tuple[int, ...]
    microbatch_multiple: int = 1

    def __post_init__(self) -> None:
        if not self.operators:
            raise ValueError(f"stage {self.id} holds no operator")
        if not self.devices:
            raise ValueError(f"stage {self.id} is on no device")
        if self.microbatch_multiple < 1:
            raise ValueError(
                f"stage {self.id}: microbatch_multiple must be at least 1, "
                f"got {self.microbatch_multiple}"
            )


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages in topological order. The last one computes the loss.

    Attributes:
        stages: the stages; ``stages[i].id == i``.
        planner: name of the planner that made it (``"manual"`` for one made by hand).

    Raises:
        ValueError: stage ids are not 0, 1, 2, …
    """

    stages: tuple[Stage, ...]
    planner: str = "manual"

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a plan needs at least one stage")
        if [stage.id for stage in self.stages] != list(range(len(self.stages))):
            raise ValueError(
                f"stage ids must count up from 0, got {[stage.id for stage in self.stages]}"
            )

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def num_devices(self) -> int:
        """One more than the highest device index in use."""
        return 1 + max(device for stage in self.stages for device in stage.devices)

    @property
    def stage_operators(self) -> Sequence[Sequence[str]]:
        """Operator names of each stage."""
        return [stage.operators for stage in self.stages]
