"""Accelerators, and the devices of a run."""
