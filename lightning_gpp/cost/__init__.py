"""Costs of operators: measured profiles, and estimates where there is none."""

from lightning_gpp.cost.costs import ANY_DEVICE as ANY_DEVICE
from lightning_gpp.cost.costs import ESTIMATED as ESTIMATED
from lightning_gpp.cost.costs import Costs as Costs
from lightning_gpp.cost.costs import costs_from_json as costs_from_json
from lightning_gpp.cost.costs import costs_to_json as costs_to_json
from lightning_gpp.cost.costs import load_costs as load_costs
from lightning_gpp.cost.estimate import estimate_costs as estimate_costs
from lightning_gpp.cost.estimate import graph_work as graph_work
from lightning_gpp.cost.estimate import with_estimates as with_estimates
from lightning_gpp.cost.profile import OpProfile as OpProfile
from lightning_gpp.cost.profile import Profile as Profile
from lightning_gpp.cost.roofline import powers_of_two as powers_of_two
from lightning_gpp.cost.roofline import roofline_costs as roofline_costs
from lightning_gpp.cost.work import Line as Line
from lightning_gpp.cost.work import OpWork as OpWork
