"""Piper's dynamic program over downsets (NeurIPS 2021)."""

from lightning_gpp.planner.piper.planner import piper, plan_instance

__all__ = ["piper", "plan_instance"]
