"""Costs that the user gives to plan with, instead of a measurement or to correct one."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lightning_gpp.cost import Costs, load_costs
from lightning_gpp.simulate.refit.refit import Refit, is_refit_file, load_refit

LAST_REFIT: Literal["refit"] = "refit"
"""The refit that was kept when this model last ran with a TimelineCallback on such devices."""

CostsLike = Costs | Refit | str | Path
"""Costs, a refit, a file that holds either, or :data:`LAST_REFIT`."""

GivenCosts = Costs | Refit | Literal["refit"]
"""The same, read."""


def resolve_costs(given: CostsLike | None) -> GivenCosts | None:
    """Reads the costs that the user gave.

    Raises:
        ValueError: the file holds neither costs nor a refit.
        FileNotFoundError: there is no such file.
    """
    if given is None or isinstance(given, (Costs, Refit)):
        return given
    if given == LAST_REFIT:
        return LAST_REFIT
    return load_refit(given) if is_refit_file(given) else load_costs(given)
