"""Costs of an SPMD program: seconds of compute and collectives, bytes on every device."""
