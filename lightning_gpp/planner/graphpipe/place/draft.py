"""A plan as the search changes it: sets of units on device groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

Units = int
"""A set of units: bit ``i`` is the unit at place ``i`` of the depth-first order."""


class DraftStage(NamedTuple):
    """A stage of a draft.

    Attributes:
        units: what it holds.
        devices: one per replica.
        multiple: smallest micro-batches that all its replicas together take at a time.
        recompute: whether it runs its forward again.
        shares: of unequal replicas, as those of a :class:`~lightning_gpp.planner.plan.plan.Stage`.
    """

    units: Units
    devices: tuple[int, ...]
    multiple: int = 1
    recompute: bool = False
    shares: tuple[int, ...] = ()

    @property
    def num_replicas(self) -> int:
        """Replicas of the stage."""
        return len(self.devices)


class Draft(NamedTuple):
    """Stages in topological order.

    Attributes:
        stages: the stages; the last one computes the loss.
        num_microbatches: smallest micro-batches of a mini-batch.
    """

    stages: tuple[DraftStage, ...]
    num_microbatches: int

    @property
    def num_devices(self) -> int:
        """Devices with a stage or a replica of one."""
        return len({device for stage in self.stages for device in stage.devices})

    def with_stage(self, number: int, *stages: DraftStage) -> Draft:
        """The draft with others in the place of one stage; perhaps none, and not in order."""
        before, after = self.stages[:number], self.stages[number + 1 :]
        return self._replace(stages=(*before, *stages, *after))

    def reduced(self) -> Draft:
        """The same with as few smallest micro-batches as are needed.

        >>> Draft((DraftStage(1, (0,), 4), DraftStage(2, (0, 1), 8)), 16).reduced()
        Draft(stages=(DraftStage(units=1, devices=(0,), multiple=1, recompute=False, shares=()), \
DraftStage(units=2, devices=(0, 1), multiple=2, recompute=False, shares=())), num_microbatches=4)
        """
        most = math.gcd(self.num_microbatches, *(self._spare(stage) for stage in self.stages))
        return self if most == 1 else self._counted(lambda count: count // most)

    def scaled(self, factor: int) -> Draft:
        """The same with smallest micro-batches of which ``factor`` make one of today."""
        return self._counted(lambda count: count * factor)

    def _counted(self, changed: Callable[[int], int]) -> Draft:
        """The same with other numbers of smallest micro-batches everywhere."""
        stages = [
            one._replace(multiple=changed(one.multiple), shares=tuple(map(changed, one.shares)))
            for one in self.stages
        ]
        return Draft(tuple(stages), changed(self.num_microbatches))

    @staticmethod
    def _spare(stage: DraftStage) -> int:
        return math.gcd(*stage.shares) if stage.shares else stage.multiple // stage.num_replicas
