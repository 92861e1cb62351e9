"""Pipeline of layers, graph parallelism, or both: how many ways?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from lightning_gpp.graph.graph_parallel import WaysGraph
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.make_plan import answer
from lightning_gpp.planner.message_bytes import border_bytes
from lightning_gpp.planner.plan.plan import Plan
from lightning_gpp.planner.step_time.evaluate import PlanEvaluation, evaluate_plan
from lightning_gpp.planner.ways.plan_in_ways import first_way, plan_in_ways


@dataclass(frozen=True, slots=True)
class WaysQuestion:
    """The question for a number of ways.

    Attributes:
        request: for the model in ways; its micro-batches are the chunks.
        model: the same model.
        notes: what to know of the division.
    """

    request: PlanRequest
    model: WaysGraph
    notes: tuple[str, ...] = ()

    @property
    def num_ways(self) -> int:
        """Devices that divide the vertices of every chunk."""
        return self.model.num_ways

    @property
    def num_groups(self) -> int:
        """Groups of layers."""
        return self.request.num_devices // self.num_ways

    @property
    def num_chunks(self) -> int:
        """Chunks that go through the layers one after the other."""
        return self.request.num_microbatches or 1


@dataclass(frozen=True)
class WaysAnswer:
    """A plan for a number of ways.

    Attributes:
        question: which it answers.
        plan: for the model in ways.
    """

    question: WaysQuestion
    plan: Plan

    @cached_property
    def evaluation(self) -> PlanEvaluation:
        """What the plan would do; an epoch is a step."""
        return evaluate_plan(self.plan, self.question.request)

    @cached_property
    def message_bytes(self) -> float:
        """Bytes of activations and gradients that devices send in an epoch."""
        return border_bytes(self.plan, self.question.request)


def answer_ways(questions: Iterable[WaysQuestion], planner: str) -> Iterator[WaysAnswer]:
    """The plan for every number of ways.

    Args:
        questions: one per number of ways.
        planner: name of the planner that divides the layers.

    Raises:
        ValueError: the layers cannot be divided so.
    """
    for question in questions:
        part = first_way(question.request, question.model)
        yield WaysAnswer(question, plan_in_ways(answer(part, planner), question.model))


def numbers_of_ways(num_devices: int) -> list[int]:
    """The numbers of ways that divide the devices.

    >>> numbers_of_ways(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [ways for ways in range(1, num_devices + 1) if num_devices % ways == 0]
