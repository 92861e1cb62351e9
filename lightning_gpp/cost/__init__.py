"""What operators cost: measured profiles."""

from lightning_gpp.cost.profile import OpProfile, Profile

__all__ = ["OpProfile", "Profile"]
