"""Weight stashing: a backward meets the weights of its forward (PipeDream, SOSP 2019, 3.3).

The gradient is exact for weights that are ``difference`` updates old by then; a stage keeps as many
versions as it has mini-batches in flight.
"""

from lightning_gpp.weights.policies.policy import Policy

STASH = Policy("stash")
