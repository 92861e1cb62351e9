"""The synchronous reference: the pipeline drains after every mini-batch (GPipe)."""

from lightning_gpp.weights.policies.policy import Policy

FLUSH = Policy("flush", drains=True, versions=lambda place: 1)
