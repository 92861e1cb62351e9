"""SpecTrain (Chen et al. 2018, arXiv 1809.02839): both passes run with predicted weights.

In a chain of ``N`` stages stage ``k`` predicts ``k // 2 + N - k - 1`` updates ahead for its forward
and ``k // 2`` for its backward, so that all passes of a mini-batch aim at one version. The paper
defines it for SGD with momentum.
"""

from lightning_gpp.weights.policies.policy import BackwardWeights, Place, Policy


def _half_way(place: Place) -> int:
    return place.rank // 2


def _forward(place: Place) -> int:
    return _half_way(place) + place.difference


SPECTRAIN = Policy(
    "spectrain",
    forward=_forward,
    backward=BackwardWeights.PREDICTED,
    backward_ahead=_half_way,
    least_versions=2,
    most_versions=2,
)
