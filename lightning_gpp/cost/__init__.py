"""What operators cost: measured profiles, and an estimate where there is none."""

from lightning_gpp.cost.costs import ANY_DEVICE, Costs
from lightning_gpp.cost.estimate import ESTIMATED, estimate_profile
from lightning_gpp.cost.json_form import profile_from_json, profile_to_json
from lightning_gpp.cost.profile import OpProfile, Profile

__all__ = [
    "ANY_DEVICE",
    "ESTIMATED",
    "Costs",
    "OpProfile",
    "Profile",
    "estimate_profile",
    "profile_from_json",
    "profile_to_json",
]
