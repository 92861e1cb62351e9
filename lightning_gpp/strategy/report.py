"""What a person sees before training starts."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from tqdm.auto import tqdm

from lightning_gpp.planner import evaluate_plan
from lightning_gpp.reports import describe_plan
from lightning_gpp.strategy.planning.planning import Planned


def describe_planned(planned: Planned) -> str:
    """The plan as a table, what bounds the step, the stage graph as a picture, and notes."""
    evaluation = evaluate_plan(planned.plan, planned.request)
    return "\n\n".join((describe_plan(evaluation, planned.request), *planned.notes))


def show(text: str) -> None:
    """Prints on rank 0, between progress bars instead of into them."""
    with tqdm.external_write_mode():
        rank_zero_info(text)


def warn_of_state(names: Sequence[str], num_microbatches: int) -> None:
    """Says which buffers a cut mini-batch leaves with other values than one device does.

    Args:
        names: qualified names of the buffers.
        num_microbatches: of the mini-batch.
    """
    modules = sorted({name.rpartition(".")[0] or "the module itself" for name in names})
    rank_zero_warn(
        f"forward changes the buffers {', '.join(names)} (of {', '.join(modules)}) by what is in "
        f"its arguments. They change once for each of the {num_microbatches} micro-batches of a "
        "mini-batch, so they, and what is computed from them, differ from one device. Use "
        "GraphPipeStrategy(num_microbatches=1), which is exact, or put these modules into eval "
        "mode if their buffers need not change."
    )
