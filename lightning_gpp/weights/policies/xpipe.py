"""XPipe (Guan et al. 2019, arXiv 1911.04610) where a mini-batch is one micro-batch.

In a chain of ``N`` stages stage ``k`` predicts ``N - k // 2 - 1`` updates ahead for its forward and
``k // 2`` for its backward. The paper predicts with moments of its own, kept as Adam keeps them;
here they are those of the optimizer in use.
"""

from lightning_gpp.weights.policies.policy import BackwardWeights, Place, Policy


def _half_way(place: Place) -> int:
    return place.rank // 2


def _forward(place: Place) -> int:
    return place.difference + place.rank - _half_way(place)


XPIPE = Policy(
    "xpipe",
    forward=_forward,
    backward=BackwardWeights.PREDICTED,
    backward_ahead=_half_way,
    least_versions=2,
    most_versions=2,
)
