"""A lower bound of a step's time, without playing it.

Every stage waits until its first input has come all the way, works on all of its micro-batches
without a gap, and then its last gradient has to go all the way back to the inputs of the model:

.. code-block:: text

    stage 0   F0 F1 F2       B0       B1       B2
    stage 1      F0 F1    B0 F2    B1       B2          head │ work │ tail of stage 1

The longest of these over all stages is often near the step itself, since a pipeline is to keep its
slowest stage busy. A device that holds several stages does the work of all of them behind the
earliest head and before the shortest tail.

A device sends its messages one after the other, so they also take their seconds behind the first
work that sends, and before what the receiver of the last one has still to do. On many devices this
may be more: where the last stage has replicas, the gradients for all of them leave from the one
device that computes the loss, and so do all inputs.
"""

from __future__ import annotations

import math
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
        sent_s: seconds that any replica of the source sends activations in a step, at least.
        sent_back_s: seconds that any replica of the target sends gradients, at least.
    """

    source: int
    target: int
    there_s: float
    back_s: float | None
    sent_s: float = 0.0
    sent_back_s: float = 0.0


def least_step_s(
    stages: Sequence[TimedStage],
    edges: Sequence[TimedEdge],
    residents: Mapping[int, Sequence[int]] | None = None,
) -> float:
    """A lower bound of the step that :func:`~lightning_gpp.engine.play.play` finds.

    It holds for all orders in which a stage does its backwards in the order of the micro-batches
    and its forwards too, as all schedules do.

    Args:
        stages: the stages.
        edges: none before those to its source.
        residents: stages of every device that holds several, that of the loss among them.
    """
    first_heads, heads, first_tails, tails = _heads_and_tails(stages, edges)
    least_s = max(
        [head + stage.work_s + tail for head, stage, tail in zip(heads, stages, tails, strict=True)]
    )
    fed_s, ports = _ports(stages, edges, first_tails)
    least_s = max(least_s, fed_s)
    for number, (stage, (sent_s, after_s)) in enumerate(zip(stages, ports)):
        if sent_s:
            least_s = max(least_s, first_heads[number] + stage.forward_s + sent_s + after_s)
    for numbers in residents.values() if residents else ():
        work_s = sum([stages[number].work_s for number in numbers])
        head_s = min([first_heads[number] for number in numbers])
        tail_s = min([first_tails[number] for number in numbers])
        least_s = max(least_s, head_s + work_s + tail_s)
        sent_s = sum([ports[number][0] for number in numbers])
        if sent_s:
            first_s = min([first_heads[number] + stages[number].forward_s for number in numbers])
            least_s = max(least_s, first_s + sent_s + min([ports[n][1] for n in numbers]))
    return least_s


def _ports(
    stages: Sequence[TimedStage], edges: Sequence[TimedEdge], tails: Sequence[float]
) -> tuple[float, list[tuple[float, float]]]:
    """What sending takes: until all that is fed is used, and of a replica of every stage.

    Args:
        stages: the stages.
        edges: between them.
        tails: behind the last backward of any replica of every stage.

    Returns:
        Of every stage the seconds of all messages, and those behind the last of them.
    """
    sent, after = [0.0] * len(stages), [math.inf] * len(stages)
    fed_s, after_feed_s = 0.0, math.inf
    for source, target, _, back_s, sent_s, sent_back_s in edges:
        reader = stages[target]
        used_s = reader.forward_s + reader.backward_s + tails[target]
        if source == FEED:
            fed_s += sent_s
            after_feed_s = min(after_feed_s, used_s)
            continue
        sent[source] += sent_s
        after[source] = min(after[source], used_s)
        if back_s is not None:
            sent[target] += sent_back_s
            after[target] = min(after[target], stages[source].backward_s + tails[source])
    return fed_s + after_feed_s if fed_s else 0.0, list(zip(sent, after))


def _heads_and_tails(
    stages: Sequence[TimedStage], edges: Sequence[TimedEdge]
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Of every stage what comes before its first forward, and behind its last backward.

    Returns:
        When the first forward of any replica can begin, and that of the last one; seconds between
        the last backward of whichever replica and the end, to which all replicas hand their last
        gradients before theirs, and of the last replica.
    """
    units, replicas, _, forward_s, backward_s, ends_s = zip(*stages)
    shares = [own // count for own, count in zip(units, replicas)]
    first_heads, heads = [0.0] * len(stages), [0.0] * len(stages)
    first_tails, tails = [*ends_s], [*ends_s]
    for source, target, there_s, back_s, _, _ in edges:
        any_s = head_s = there_s
        if source != FEED:
            own_units, own_s = units[source], forward_s[source]
            shared, together = shares[target] // own_units, units[target] // own_units
            any_s += first_heads[source] + (shared * own_s if shared > 1 else own_s)
            last_s = heads[source] if own_units <= units[target] else first_heads[source]
            head_s += last_s + (together * own_s if together > 1 else own_s)
            if back_s is not None:
                own_s = backward_s[source]
                first_tails[target] = max(first_tails[target], back_s + own_s + first_tails[source])
                sent_s = max(1, shares[target] // shares[source]) * back_s + own_s
                used_s = back_s + (shared * own_s if shared > 1 else own_s)
                tails[target] = max(tails[target], max(sent_s, used_s) + tails[source])
        if first_heads[target] < any_s:
            first_heads[target] = any_s
        if heads[target] < head_s:
            heads[target] = head_s
    return first_heads, heads, first_tails, tails
