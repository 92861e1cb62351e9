"""What a person sees before training starts."""

from __future__ import annotations

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from tqdm.auto import tqdm

from lightning_gpp.planner import describe_plan, evaluate_plan, plan_request
from lightning_gpp.strategy.pipeline import Pipeline


def describe_pipeline(pipeline: Pipeline, num_microbatches: int) -> str:
    """The plan as a table, what bounds the step, and the stage graph as a picture."""
    graph, costs = pipeline.captured.graph, pipeline.profile
    size = graph.microbatch_size if costs is None else costs.microbatch_size
    request = plan_request(
        graph,
        pipeline.plan.num_devices,
        costs=costs,
        minibatch_size=round(size * num_microbatches),
        num_microbatches=num_microbatches,
        schedule=pipeline.settings.schedule,
    )
    return describe_plan(evaluate_plan(pipeline.plan, request), request)


def show(text: str) -> None:
    """Prints on rank 0, between progress bars instead of into them."""
    with tqdm.external_write_mode():
        rank_zero_info(text)
