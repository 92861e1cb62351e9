"""Plans of pipelines with one micro-batch size and data-parallel stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan.plan import Plan, Stage


@dataclass(frozen=True, slots=True)
class ReplicatedStage:
    """A stage before its micro-batches are decided.

    Attributes:
        operators: operator names, in topological order.
        devices: one per replica.
        recompute: whether it runs its forward again.
    """

    operators: tuple[str, ...]
    devices: tuple[int, ...]
    recompute: bool = False


def uniform_plans(
    request: PlanRequest,
    stages: Sequence[ReplicatedStage],
    microbatch_size: float,
    planner: str,
) -> Iterator[Plan]:
    """The two ways to run replicated stages with micro-batches of one size.

    Replicas can *take turns*, each with whole micro-batches (as PipeDream and Piper do), or *share*
    every micro-batch (as the runtime does that GraphPipe's authors ran them on). Where no stage has
    replicas, both are the same plan. A way that does not divide evenly is left out.

    Args:
        request: the mini-batch.
        stages: in topological order.
        microbatch_size: in samples.
        planner: its name.
    """
    most = max(len(stage.devices) for stage in stages)
    for shares in dict.fromkeys((1, most)):
        unit_size = microbatch_size / shares
        count = round(request.minibatch_size / unit_size)
        multiples = [len(stage.devices) if shares == 1 else most for stage in stages]
        if unit_size < 1 or any(count % multiple for multiple in multiples):
            continue
        yield Plan(
            tuple(
                Stage(number, stage.operators, stage.devices, multiple, stage.recompute)
                for number, (stage, multiple) in enumerate(zip(stages, multiples))
            ),
            planner,
            num_microbatches=count,
            is_chain=True,
        )
