"""What a person sees before training starts."""

from __future__ import annotations

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from tqdm.auto import tqdm

from lightning_gpp.planner import describe_plan, evaluate_plan
from lightning_gpp.strategy.planning import Planned


def describe_planned(planned: Planned) -> str:
    """The plan as a table, what bounds the step, the stage graph as a picture, and notes."""
    evaluation = evaluate_plan(planned.plan, planned.request)
    return "\n\n".join((describe_plan(evaluation, planned.request), *planned.notes))


def show(text: str) -> None:
    """Prints on rank 0, between progress bars instead of into them."""
    with tqdm.external_write_mode():
        rank_zero_info(text)
