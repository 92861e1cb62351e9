"""What a policy of weights says; each of them is a value in a file of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stage is in a pipeline that does not drain.

    Attributes:
        difference: updates of its weights between the forward and the backward of a mini-batch; it
            grows up to ``ahead`` while the pipeline fills. Fewer where the gradients of several
            mini-batches are accumulated for one update.
        ahead: mini-batches that it is ahead of its backward once the pipeline is full.
        most_ahead: the most that any stage is.
    """

    difference: int
    ahead: int
    most_ahead: int

    @property
    def rank(self) -> int:
        """Its number in a chain of equally many stages, the first one 0."""
        return self.most_ahead - self.ahead


class BackwardWeights(Enum):
    """Which weights a backward meets."""

    OF_FORWARD = "those that the forward ran with; a copy per mini-batch in flight"
    OF_THE_MOMENT = "those that the stage has then"
    PREDICTED = "those that the stage has then, predicted further"


def nothing_ahead(place: Place) -> int:
    """No prediction."""
    return 0


@dataclass(frozen=True, slots=True)
class Policy:
    """With which weights the forwards and backwards of a stage run.

    Attributes:
        name: by which users choose it.
        forward: updates that the weights of a forward are predicted ahead.
        backward: which weights its backward meets.
        backward_ahead: updates that these are predicted ahead, where they are.
        drains: whether the pipeline drains after every mini-batch, so that there is one version.
        is_one_behind: whether forwards run with the version before the one that their backward
            finds (2BW).
        least_versions: copies of the weights of a stage that are alive at most, the newest
            included: at least so many.
        most_versions: as many as its mini-batches in flight meet, but at most these; None does not
            limit them.
    """

    name: str
    forward: Callable[[Place], int] = nothing_ahead
    backward: BackwardWeights = BackwardWeights.OF_FORWARD
    backward_ahead: Callable[[Place], int] = nothing_ahead
    drains: bool = False
    is_one_behind: bool = False
    least_versions: int = 1
    most_versions: int | None = None

    @property
    def predicts(self) -> bool:
        """Whether any pass runs with predicted weights."""
        return {self.forward, self.backward_ahead} != {nothing_ahead}

    def held_versions(self, per_update: int) -> tuple[int, int | None, bool, int]:
        """Copies of the weights that a stage holds, as ``HeldVersions`` of the planners has them.

        Args:
            per_update: mini-batches of an update.
        """
        keeps_predictions = self.predicts and self.backward is BackwardWeights.OF_FORWARD
        return self.least_versions, self.most_versions, keeps_predictions, per_update

    def why_not(self, per_update: int, most_ahead: int) -> str | None:
        """Why it cannot accumulate the gradients of so many mini-batches; None where it can.

        Args:
            per_update: mini-batches of an update.
            most_ahead: mini-batches that a stage is ahead of its backward at most.
        """
        if self.backward is BackwardWeights.PREDICTED and per_update > 1:
            return (
                f"weights={self.name!r} updates after every batch, but accumulate_grad_batches is "
                f"{per_update}: use weights='pipeoptim', or larger batches"
            )
        if self.is_one_behind and per_update < most_ahead:
            return (
                f"weights={self.name!r} delays every update by one, so an update has to be of as "
                "many batches as the pipeline is ahead: got accumulate_grad_batches="
                f"{per_update}, expected at least {most_ahead}"
            )
        return None
