"""Plans of pipelines with one micro-batch size and data-parallel stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.plan import Plan, Stage


def uniform_plans(
    request: PlanRequest,
    stages: Sequence[tuple[Sequence[str], Sequence[int]]],
    microbatch_size: float,
    planner: str,
) -> Iterator[Plan]:
    """The two ways to run replicated stages with micro-batches of one size.

    Replicas can *take turns*, each with whole micro-batches (as PipeDream and Piper do), or *share*
    every micro-batch (as the runtime does that GraphPipe's authors ran them on). Where no stage has
    replicas, both are the same plan. A way that does not divide evenly is left out.

    Args:
        request: the mini-batch.
        stages: operators and devices of every stage, in topological order.
        microbatch_size: in samples.
        planner: its name.
    """
    most = max(len(devices) for _, devices in stages)
    for shares in dict.fromkeys((1, most)):
        unit_size = microbatch_size / shares
        count = round(request.minibatch_size / unit_size)
        multiples = [len(devices) if shares == 1 else most for _, devices in stages]
        if unit_size < 1 or any(count % multiple for multiple in multiples):
            continue
        yield Plan(
            tuple(
                Stage(number, tuple(operators), tuple(devices), multiple)
                for number, ((operators, devices), multiple) in enumerate(zip(stages, multiples))
            ),
            planner,
            num_microbatches=count,
            is_chain=True,
        )
