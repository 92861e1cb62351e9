"""What a person sees before training starts."""

from __future__ import annotations

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from tqdm.auto import tqdm

from lightning_gpp.planner import describe_plan
from lightning_gpp.strategy.pipeline import Pipeline


def describe_pipeline(pipeline: Pipeline, num_microbatches: int) -> str:
    """The plan as a table and the stage graph as a picture."""
    return describe_plan(
        pipeline.plan,
        pipeline.captured.graph,
        pipeline.profile,
        num_microbatches=num_microbatches,
        schedule=pipeline.settings.schedule,
    )


def show(text: str) -> None:
    """Prints on rank 0, between progress bars instead of into them."""
    with tqdm.external_write_mode():
        rank_zero_info(text)
