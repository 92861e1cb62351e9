"""PipeOptim (arXiv 2312.00839, section 3): predict once, before the forward.

The forward runs with the weights predicted for the version that its backward will meet; the
backward meets the weights of the moment. Two versions at most are alive, and the predicted one only
while the forward runs.
"""

from lightning_gpp.weights.policies.policy import BackwardWeights, Place, Policy


def _difference(place: Place) -> int:
    return place.difference


def _one_more(place: Place) -> int:
    """As the authors' published code predicts: on the last stage, too, one update ahead."""
    return place.difference + 1


PIPEOPTIM = Policy(
    "pipeoptim", forward=_difference, backward=BackwardWeights.OF_THE_MOMENT, most_versions=2
)

PIPEOPTIM_RELEASE = Policy(
    "pipeoptim-release",
    forward=_one_more,
    backward=BackwardWeights.OF_THE_MOMENT,
    least_versions=2,
    most_versions=2,
)
"""With the version difference of the authors' code, which is one more than the paper's."""

PIPEOPTIM_AT_PREDICTED = Policy("pipeoptim-at-predicted", forward=_difference)
"""Another algorithm: the gradient *at* the predicted weights, which are kept for the backward."""
