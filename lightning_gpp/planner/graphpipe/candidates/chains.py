"""Chains of work and messages in a step: each is a lower bound of it, the longest an estimate.

The judge (:func:`lightning_gpp.planner.step_time.evaluate.evaluate_plan`) plays all micro-batches
of a plan. Three kinds of chains of what it plays are nearly always among the longest, and can be
written down without playing anything:

- *work*: a stage gets its first micro-batch, forwards what it may have in flight or waits for its
  first gradient, does the rest of its work, and its last gradient goes back to where the model
  begins;
- *messages*: a stage sends, or receives, all that it has to;
- *loops*: a stage forwards a micro-batch only when the gradient of an earlier one is back, so the
  way to a later stage and back counts once for every so many micro-batches as the first of them has
  more in flight than the last, and one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Hop(NamedTuple):
    """An edge between two stages; replicas exchange what their micro-batches have in common.

    Attributes:
        target: the stage that it leads to.
        there_s: seconds from a forward of the source until the first message is at the target.
        back_s: seconds from a backward of the target until the first message is back; None where
            no gradients flow.
        forwards: of a replica of the source that a forward of one of the target needs.
        backwards: of a replica of the target that a backward of one of the source needs.
        all_forwards: of the source that the first forward of the last replica of the target needs,
            where the source has no larger micro-batches.
        message_back_s: seconds of a message on its way back.
    """

    target: int
    there_s: float
    back_s: float | None
    forwards: int = 1
    backwards: int = 1
    all_forwards: int = 1
    message_back_s: float = 0.0


class ChainStage(NamedTuple):
    """A stage as chains see it: one of its replicas, and the last one at both ends of a step.

    Attributes:
        size: units of the smallest micro-batch that it takes at a time.
        num_microbatches: those of a mini-batch.
        in_flight: the most of them between forward and backward.
        block: backwards, and forwards, that it does in a row.
        forward_s: seconds of a forward.
        backward_s: seconds of a backward.
        reduce_s: seconds after its last backward.
        fed_s: seconds until the first of the model's inputs that it reads are there.
        sent_s: seconds of what it sends for a micro-batch.
        sent_there_s: seconds of the activations in it.
        hops: the edges to later stages.
    """

    size: int
    num_microbatches: int
    in_flight: int
    block: int
    forward_s: float
    backward_s: float
    reduce_s: float
    fed_s: float
    sent_s: float
    sent_there_s: float
    hops: Sequence[Hop]

    @property
    def work_s(self) -> float:
        """Seconds of a forward and a backward."""
        return self.forward_s + self.backward_s


class Chains:
    """The longest chains of some stages.

    Args:
        stages: in topological order.
    """

    def __init__(self, stages: Sequence[ChainStage]) -> None:
        self._stages = stages
        self._largest = max(stage.size for stage in stages)
        self._until_s = self._first_inputs()
        self._return_s = self._first_gradients()
        self._drain_s = self._ends()
        self._last_s = self._last_ways()

    def least_step_s(self, enough_s: float = math.inf) -> float:
        """Seconds that the step takes at least.

        Args:
            enough_s: whether it takes longer than this is of no interest.
        """
        least_s = max(map(self._work_and_messages, range(len(self._stages))))
        for number in range(len(self._stages)):
            if least_s >= enough_s:
                break
            least_s = max(least_s, self._loops(number))
        return least_s

    def _first_inputs(self) -> list[float]:
        """Seconds until the last replica of every stage can begin."""
        any_s = [stage.fed_s for stage in self._stages]
        until_s = list(any_s)
        for number, stage in enumerate(self._stages):
            for hop in stage.hops:
                target = hop.target
                first_s = any_s[number] + self._there_s(stage, hop, hop.forwards)
                any_s[target] = max(any_s[target], first_s)
                if stage.size <= self._stages[target].size:
                    first_s = until_s[number] + self._there_s(stage, hop, hop.all_forwards)
                until_s[target] = max(until_s[target], first_s)
        return until_s

    def _there_s(self, stage: ChainStage, hop: Hop, forwards: int) -> float:
        """Seconds from the first forward of a stage until another one has its first input."""
        if forwards == 1:
            return stage.forward_s + hop.there_s
        more_s = max(stage.forward_s, stage.sent_there_s if forwards == hop.forwards else 0.0)
        return stage.forward_s + (forwards - 1) * more_s + hop.there_s

    def _first_gradients(self) -> list[float]:
        """Seconds from the first forward of every stage until its first gradients are there."""
        stages = self._stages
        return_s = [stage.forward_s for stage in stages]
        for number in range(len(stages) - 1, -1, -1):
            for hop in stages[number].hops:
                if hop.back_s is not None:
                    way_s = self._there_s(stages[number], hop, hop.forwards) + return_s[hop.target]
                    way_s += hop.backwards * stages[hop.target].backward_s + hop.back_s
                    if way_s > return_s[number]:
                        return_s[number] = way_s
        return return_s

    def _ends(self) -> list[float]:
        """Seconds from the last backward of every stage until those before it are done, too."""
        drain_s = [stage.reduce_s for stage in self._stages]
        for number, stage in enumerate(self._stages):
            for hop in stage.hops:
                if hop.back_s is not None:
                    last_s = hop.back_s + stage.backward_s + drain_s[number]
                    last_s += (hop.forwards - 1) * max(stage.backward_s, hop.message_back_s)
                    if last_s > drain_s[hop.target]:
                        drain_s[hop.target] = last_s
        return drain_s

    def _last_ways(self) -> list[float]:
        """Seconds from the last forward of every stage until it, and those behind it, are done."""
        stages = self._stages
        last_s = [0.0] * len(stages)
        for number in range(len(stages) - 1, -1, -1):
            own = stages[number]
            longest_s = self._drain_s[number] + own.forward_s + own.backward_s
            for hop in own.hops:
                way_s = own.forward_s + hop.there_s + last_s[hop.target]
                if way_s > longest_s:
                    longest_s = way_s
            last_s[number] = longest_s
        return last_s

    def _work_and_messages(self, number: int) -> float:
        stage = self._stages[number]
        first_gradient_s = max(stage.in_flight * stage.forward_s, self._return_s[number])
        rest_s = stage.num_microbatches * stage.work_s - stage.in_flight * stage.forward_s
        work_s = first_gradient_s + rest_s + self._drain_s[number]
        if stage.num_microbatches > stage.in_flight:  # then forwards are left, too
            last_s = first_gradient_s + rest_s - stage.in_flight * stage.backward_s
            work_s = max(work_s, last_s - stage.forward_s + self._last_s[number])
        work_s += self._until_s[number]
        sent_s = self._until_s[number] + stage.forward_s + stage.num_microbatches * stage.sent_s
        return max(work_s, sent_s)

    def _loops(self, number: int) -> float:
        """The longest of all loops from a stage to a later one and back."""
        stage = self._stages[number]
        if stage.num_microbatches - stage.in_flight < 2:
            return 0.0
        work_s = stage.forward_s + stage.backward_s
        least_s = 0.0
        for lag, loop_s in self._loops_of(number).items():
            if loop_s > lag * work_s:  # a quicker one never makes the stage wait
                least_s = max(least_s, self._with_loop(number, lag, loop_s))
        return least_s

    def _loops_of(self, first: int) -> dict[int, float]:
        """Micro-batches -> seconds of the longest loop of so many from a stage on and back."""
        stages, stage = self._stages, self._stages[first]
        loops: dict[int, float] = {}
        if stage.in_flight * stage.size % self._largest == 0 and stage.in_flight % stage.block == 0:
            loops[stage.in_flight] = self._return_s[first] + stage.block * stage.backward_s
        # From here on only through stages with micro-batches of one size.
        there_s: dict[int, float] = {first: 0.0}
        back_s: dict[int, float] = {first: 0.0}
        for number in range(first, len(stages)):
            start_s = there_s.get(number)
            if start_s is None:
                continue
            here = stages[number]
            end_s = back_s.get(number)
            until_s = start_s + here.forward_s
            from_s = None if end_s is None else end_s + here.backward_s
            if number > first and from_s is not None:
                lag = stage.in_flight - here.in_flight + 1
                if until_s + from_s > loops.get(lag, 0.0):
                    loops[lag] = until_s + from_s
            for target, hop_there_s, hop_back_s, *_ in here.hops:
                if stages[target].size == stage.size:
                    if until_s + hop_there_s > there_s.get(target, -1.0):
                        there_s[target] = until_s + hop_there_s
                    if from_s is None or hop_back_s is None:
                        continue
                    if hop_back_s + from_s > back_s.get(target, -1.0):
                        back_s[target] = hop_back_s + from_s
        return loops

    def _with_loop(self, number: int, lag: int, loop_s: float) -> float:
        """Seconds of a step in which a stage can only begin ``lag`` micro-batches per loop."""
        stage = self._stages[number]
        forward_s, backward_s, return_s = stage.forward_s, stage.backward_s, self._return_s[number]
        in_flight = stage.in_flight
        times = (stage.num_microbatches - 1 - in_flight) // lag
        rest = stage.num_microbatches - in_flight - times * lag
        start_s = self._until_s[number] + max(in_flight * forward_s, return_s) + backward_s
        work_s = forward_s + (rest + in_flight - 1) * backward_s + (rest - 1) * forward_s
        end_s = max(return_s + rest * backward_s, work_s) + self._drain_s[number]
        end_s = max(end_s, (rest - 1) * stage.work_s + self._last_s[number])
        return start_s + times * loop_s + end_s
