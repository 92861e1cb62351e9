"""Policies: which weights the stages use in a pipeline that does not drain.

- ``flush``: the synchronous reference; the pipeline drains after every mini-batch (GPipe).
- ``stash``: weight stashing (PipeDream, SOSP 2019, 3.3): a backward meets the weights of its
  forward. The gradient is exact for weights that are ``difference`` updates old by then.
- ``2bw``: PipeDream-2BW (arXiv 2006.09503): every update is delayed by exactly one. An update takes
  the gradients of as many mini-batches as the pipeline is deep, or more (accumulated), all at the
  same version: ``W(t+1) = W(t) - f(W(t-1))``. The very first update has no delay, nor has the first
  one after the pipeline was filled anew.
- ``pipeoptim``: PipeOptim (arXiv 2312.00839, section 3): the forward runs with the weights
  predicted for the version that its backward will meet, which meets the weights of the moment.
- ``pipeoptim-release``: the same with the version difference of the authors' published code, one
  more than the paper's, on the last stage, too.
- ``pipeoptim-at-predicted``: another algorithm: the gradient *at* the predicted weights.
- ``spectrain``: SpecTrain (Chen et al. 2018, arXiv 1809.02839): both passes are predicted. In a
  chain of ``N`` stages stage ``k`` predicts ``k // 2 + N - k - 1`` updates ahead for its forward
  and ``k // 2`` for its backward, so that all passes of a mini-batch aim at one version.
- ``xpipe``: XPipe (Guan et al. 2019, arXiv 1911.04610) where a mini-batch is one micro-batch: as
  SpecTrain with ``N - k // 2 - 1`` for the forward. The paper predicts with moments of its own;
  here they are those of the optimizer in use.
- ``none``: no remedy; shows what others cure. The backward's products use other weights than the
  forward that it belongs to (PipeDream, 3.3, calls such gradients invalid).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a stage in a pipeline that does not drain.

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
    """The weights that a backward uses."""

    OF_FORWARD = "those that the forward ran with; a copy per mini-batch in flight"
    OF_THE_MOMENT = "those that the stage has then"
    PREDICTED = "those that the stage has then, predicted further"


def nothing_ahead(place: Place) -> int:
    """No prediction."""
    return 0


def _difference(place: Place) -> int:
    return place.difference


def _half_way(place: Place) -> int:
    return place.rank // 2


@dataclass(frozen=True, slots=True)
class Policy:
    """The weights that the forwards and backwards of a stage use.

    Attributes:
        name: by which users choose it.
        forward: updates that the weights of a forward are predicted ahead.
        backward: which weights its backward meets.
        backward_ahead: updates that these are predicted ahead, where they are.
        versions: copies of the weights of a stage that are alive at most, the newest included: at
            least so many; and as many as its mini-batches in flight meet, but at most so many
            (None: without limit).
        drains: whether the pipeline drains after every mini-batch, so that there is one version.
        is_one_behind: whether forwards run with the version before the one that their backward
            finds (2BW).
    """

    name: str
    forward: Callable[[Place], int] = nothing_ahead
    backward: BackwardWeights = BackwardWeights.OF_FORWARD
    backward_ahead: Callable[[Place], int] = nothing_ahead
    versions: tuple[int, int | None] = (1, None)
    drains: bool = False
    is_one_behind: bool = False

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
        return *self.versions, keeps_predictions, per_update

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


_MOMENT, _PREDICTED = BackwardWeights.OF_THE_MOMENT, BackwardWeights.PREDICTED

PIPEOPTIM = Policy("pipeoptim", _difference, _MOMENT, versions=(1, 2))

_POLICIES = (
    PIPEOPTIM,
    Policy("pipeoptim-at-predicted", _difference),
    Policy("pipeoptim-release", lambda of: of.difference + 1, _MOMENT, versions=(2, 2)),
    Policy("stash"),
    Policy("2bw", versions=(2, 2), is_one_behind=True),
    Policy("spectrain", lambda of: _half_way(of) + of.difference, _PREDICTED, _half_way, (2, 2)),
    Policy(
        "xpipe", lambda of: of.difference + of.rank - _half_way(of), _PREDICTED, _half_way, (2, 2)
    ),
    Policy("flush", versions=(1, 1), drains=True),
    Policy("none", backward=_MOMENT, versions=(1, 1)),
)
POLICIES: Mapping[str, Policy] = MappingProxyType({policy.name: policy for policy in _POLICIES})
"""Policies of weights by name."""


def find_policy(name: str) -> Policy:
    """The policy of a name.

    Raises:
        ValueError: there is none; the text names the known ones.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy of weights {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]
