"""How long a step takes at least: a lower bound of playing it, without playing it.

Every stage waits until its first input has come all the way, works on all of its micro-batches
without a gap, and then its last gradient has to go all the way back to the inputs of the model:

.. code-block:: text

    stage 0   F0 F1 F2       B0       B1       B2
    stage 1      F0 F1    B0 F2    B1       B2          head │ work │ tail of stage 1

The longest of these over all stages is often near the step itself, since a pipeline is to keep its
slowest stage busy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_gpp.graph import FEED
from lightning_gpp.planner.step_time.timing import Messages, TimedStage


def least_step_s(
    stages: Sequence[TimedStage],
    forward: Mapping[tuple[int, int], Messages],
    backward: Mapping[tuple[int, int], Messages],
) -> float:
    """A lower bound of the step that :func:`~lightning_gpp.planner.step_time.timing.play` finds.

    It holds for all orders in which a stage does its backwards in the order of the micro-batches
    and its forwards too, as all schedules do.

    Args:
        stages: the stages.
        forward: (source, target) -> messages with activations, none before those to its source;
            the feed is a source.
        backward: (source, target) of the edge -> messages with gradients, in such an order too.
    """
    heads, tails = _heads(stages, forward), _tails(stages, backward)
    return max(
        head + stage.work_s + tail for head, stage, tail in zip(heads, stages, tails, strict=True)
    )


def _heads(
    stages: Sequence[TimedStage], forward: Mapping[tuple[int, int], Messages]
) -> list[float]:
    """When the first forward of every stage can begin."""
    heads = [0.0] * len(stages)
    for (source, target), messages in forward.items():
        head_s = messages.message_s
        if source != FEED:
            needed = max(1, messages.per_target // messages.per_source)
            head_s += heads[source] + needed * stages[source].forward_s
        if head_s > heads[target]:
            heads[target] = head_s
    return heads


def _tails(
    stages: Sequence[TimedStage], backward: Mapping[tuple[int, int], Messages]
) -> list[float]:
    """Seconds between the last backward of every stage and the end of the step."""
    tails = [stage.end_s for stage in stages]
    for (source, target), messages in backward.items():
        again_s = stages[source].backward_s
        all_sent_s = messages.per_source * messages.message_s + again_s
        needed = max(1, messages.per_source // messages.per_target)
        first_used_s = messages.message_s + needed * again_s
        tail_s = max(all_sent_s, first_used_s) + tails[source]
        if tail_s > tails[target]:
            tails[target] = tail_s
    return tails
