"""No remedy: forward and backward run with whatever weights are there; shows what others cure.

The backward's products use other weights than the forward that it belongs to (PipeDream, SOSP 2019,
3.3, calls such gradients invalid).
"""

from lightning_gpp.weights.policies.policy import BackwardWeights, Policy

NONE = Policy("none", backward=BackwardWeights.OF_THE_MOMENT, most_versions=1)
