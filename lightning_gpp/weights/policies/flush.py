"""The synchronous reference: the pipeline drains after every mini-batch (GPipe)."""

from lightning_gpp.weights.policies.policy import Policy

FLUSH = Policy("flush", drains=True, most_versions=1)
