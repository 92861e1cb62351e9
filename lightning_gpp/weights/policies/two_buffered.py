"""PipeDream-2BW (arXiv 2006.09503): every update is delayed by exactly one.

An update takes the gradients of as many mini-batches as the pipeline is deep, or more (accumulated;
the paper's micro-batches of one batch), all at the same version: ``W(t+1) = W(t) - f(W(t-1))``. So
two versions are enough: the newest, and the one before it. The very first update has no delay, nor
has the first one after the pipeline was filled anew.
"""

from lightning_gpp.weights.policies.policy import Policy

TWO_BUFFERED = Policy("2bw", is_one_behind=True, least_versions=2, most_versions=2)
