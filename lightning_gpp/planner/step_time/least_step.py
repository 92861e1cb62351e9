"""How long a step takes at least: a lower bound of playing it, without playing it.

Every stage waits until its first input has come all the way, works on all of its micro-batches
without a gap, and then its last gradient has to go all the way back to the inputs of the model:

.. code-block:: text

    stage 0   F0 F1 F2       B0       B1       B2
    stage 1      F0 F1    B0 F2    B1       B2          head │ work │ tail of stage 1

The longest of these over all stages is often near the step itself, since a pipeline is to keep its
slowest stage busy. A device that holds several stages does the work of all of them behind the
earliest head and before the shortest tail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_gpp.graph import FEED


class TimedStage(NamedTuple):
    """A stage as a line of time, that of its last replica.

    Attributes:
        units: of the smallest micro-batch in one of the stage, all replicas together.
        num_replicas: devices that share it.
        num_microbatches: its micro-batches in a mini-batch.
        forward_s: seconds of a forward.
        backward_s: seconds of a backward.
        end_s: seconds after its last step (the sum of the replicas' gradients).
    """

    units: int
    num_replicas: int
    num_microbatches: int
    forward_s: float
    backward_s: float
    end_s: float = 0.0

    @property
    def work_s(self) -> float:
        """Seconds of all its forwards and backwards."""
        return self.num_microbatches * (self.forward_s + self.backward_s)


class TimedEdge(NamedTuple):
    """An edge between stages; a message carries what micro-batches of two replicas share.

    Attributes:
        source: the stage that sends activations, or the feed.
        target: the stage that receives them.
        there_s: seconds of a message with activations, at least.
        back_s: likewise with gradients; None where none flow.
    """

    source: int
    target: int
    there_s: float
    back_s: float | None


def least_step_s(
    stages: Sequence[TimedStage],
    edges: Sequence[TimedEdge],
    residents: Mapping[int, Sequence[int]] | None = None,
) -> float:
    """A lower bound of the step that :func:`~lightning_gpp.planner.step_time.timing.play` finds.

    It holds for all orders in which a stage does its backwards in the order of the micro-batches
    and its forwards too, as all schedules do.

    Args:
        stages: the stages.
        edges: none before those to its source.
        residents: stages of every device that holds several.
    """
    first_heads, heads = _heads(stages, edges)
    tails = _tails(stages, edges)
    least_s = max(
        head + stage.work_s + tail for head, stage, tail in zip(heads, stages, tails, strict=True)
    )
    if residents:
        first_tails = _tails_of_any(stages, edges)
        for numbers in residents.values():
            work_s = sum([stages[number].work_s for number in numbers])
            head_s = min([first_heads[number] for number in numbers])
            tail_s = min([first_tails[number] for number in numbers])
            least_s = max(least_s, head_s + work_s + tail_s)
    return least_s


def _heads(
    stages: Sequence[TimedStage], edges: Sequence[TimedEdge]
) -> tuple[list[float], list[float]]:
    """When the first forward of any replica of every stage can begin, and that of the last one."""
    of_any, heads = [0.0] * len(stages), [0.0] * len(stages)
    shares = [stage.units // stage.num_replicas for stage in stages]
    for source, target, there_s, _ in edges:
        any_s = head_s = there_s
        if source != FEED:
            own_s, own_units = stages[source].forward_s, stages[source].units
            other_units = stages[target].units
            any_s += of_any[source] + max(1, shares[target] // own_units) * own_s
            last_s = heads[source] if own_units <= other_units else of_any[source]
            head_s += last_s + max(1, other_units // own_units) * own_s
        if of_any[target] < any_s:
            of_any[target] = any_s
        if heads[target] < head_s:
            heads[target] = head_s
    return of_any, heads


def _tails_of_any(stages: Sequence[TimedStage], edges: Sequence[TimedEdge]) -> list[float]:
    """Seconds between the last backward of whichever replica of every stage and the end.

    All replicas hand their last gradients to some replica of every stage before theirs.
    """
    tails = [stage.end_s for stage in stages]
    for source, target, _, back_s in edges:
        if back_s is not None and source != FEED:
            tails[target] = max(tails[target], back_s + stages[source].backward_s + tails[source])
    return tails


def _tails(stages: Sequence[TimedStage], edges: Sequence[TimedEdge]) -> list[float]:
    """Seconds between the last backward of the last replica of every stage and the end."""
    tails = [stage.end_s for stage in stages]
    shares = [stage.units // stage.num_replicas for stage in stages]
    for source, target, _, back_s in edges:
        if back_s is None or source == FEED:
            continue
        own_s, own_units = stages[source].backward_s, stages[source].units
        all_sent_s = max(1, shares[target] // shares[source]) * back_s + own_s
        first_used_s = back_s + max(1, shares[target] // own_units) * own_s
        tail_s = max(all_sent_s, first_used_s) + tails[source]
        if tails[target] < tail_s:
            tails[target] = tail_s
    return tails
