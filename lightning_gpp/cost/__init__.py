"""What operators cost: measured profiles, and estimates where there is none."""

from lightning_gpp.cost.costs import ANY_DEVICE, ESTIMATED, Costs
from lightning_gpp.cost.estimate import estimate_costs, estimate_profile, graph_work, with_estimates
from lightning_gpp.cost.json_form import (
    costs_from_json,
    costs_to_json,
    load_costs,
    profile_from_json,
    profile_to_json,
)
from lightning_gpp.cost.profile import OpProfile, Profile
from lightning_gpp.cost.roofline import powers_of_two, roofline_costs
from lightning_gpp.cost.work import Line, OpWork

__all__ = [
    "ANY_DEVICE",
    "ESTIMATED",
    "Costs",
    "Line",
    "OpProfile",
    "OpWork",
    "Profile",
    "costs_from_json",
    "costs_to_json",
    "estimate_costs",
    "estimate_profile",
    "graph_work",
    "load_costs",
    "powers_of_two",
    "profile_from_json",
    "profile_to_json",
    "roofline_costs",
    "with_estimates",
]
