"""Means of gradients over pipelines, begun while the backwards run or after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.pipelines import on_pipelines
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_gpp.graph import StageGraph
from lightning_gpp.runtime.gradients import GradientStash
from lightning_gpp.runtime.processes.peers import Peers
from lightning_gpp.runtime.sums import reduction
from lightning_gpp.runtime.sums.reduction import GradientReduction, unshared_gradients
from lightning_gpp.schedule import Action, Kind, Program, build_program
from lightning_gpp.strategy.state.step_gradients import AveragedGradients

pytestmark = pytest.mark.timeout(120)

NAMES = ("first", "second", "third")
STAGES = StageGraph(1, (), parameter_readers=tuple((name, (0,)) for name in NAMES[:2]))
PROGRAM = build_program(STAGES, devices=[0], num_microbatches=2)


class OneStage:
    """A stage of two parameters beside a third one that no stage reads, and its runs.

    Args:
        peers: the same in other pipelines.
    """

    def __init__(self, peers: Peers) -> None:
        self.parameters = {name: nn.Parameter(torch.ones(2, dtype=torch.float64)) for name in NAMES}
        self.program = PROGRAM
        self.means: GradientReduction | None = None
        held = list(self.parameters.values())
        self.averaged = AveragedGradients(held, peers, lambda program: self._sums(program, peers))

    def _sums(self, program: Program | None, peers: Peers) -> GradientReduction:
        summed = unshared_gradients(STAGES, [(0,)], 0, self.parameters, program)
        return GradientReduction(summed, peers)

    def run(self, values: tuple[float, float], factor: float = 1.0) -> bool:
        """Goes backward twice; whether sums had begun when it was over."""
        stash, self.means = GradientStash(self.parameters.values()), None
        self.averaged.begin(self, stash)  # type: ignore[arg-type]
        with stash:
            for microbatch in range(2):
                loss = sum(
                    value * self.parameters[name].sum()
                    for name, value in zip(NAMES, values, strict=False)
                    if value
                )
                if self.means is None:
                    loss.backward() if value_of(loss) else None
                else:
                    with self.means.watching(Action(0, Kind.BACKWARD, microbatch)):
                        loss.backward() if value_of(loss) else None
        stash.hand_out(torch.tensor(factor, dtype=torch.float64))
        return self.means is not None and self.means._started > 0

    def add(self, name: str, value: float) -> None:
        """The user's step gives a parameter a gradient itself."""
        (value * self.parameters[name].sum()).backward()

    def average(self) -> list[float | None]:
        """The first number of every gradient after an average; gradients are cleared."""
        self.averaged.finish(is_asked_to_end=False)
        found = [None if p.grad is None else float(p.grad[0]) for p in self.parameters.values()]
        for parameter in self.parameters.values():
            assert parameter.grad is None or len(set(parameter.grad.tolist())) == 1
            parameter.grad = None
        return found


def value_of(loss: Any) -> bool:
    """Whether there is a loss: a sum of nothing is the number 0."""
    return isinstance(loss, torch.Tensor)


@dataclass(frozen=True)
class Step:
    """What a pipeline does between two steps of the optimizer.

    Attributes:
        runs: gradients that each run gives to the parameters of the stage, per micro-batch.
        own: gradients that the user's step gives itself, by parameter.
        is_first: whether it does so before the runs.
    """

    runs: tuple[tuple[float, float], ...]
    own: tuple[tuple[str, float], ...] = ()
    is_first: bool = False

    def gradients(self) -> list[float | None]:
        """Of each parameter."""
        total: dict[str, float] = {}
        for name, value in self.own:
            total[name] = total.get(name, 0) + value
        for run in self.runs:
            for name, value in zip(NAMES, run, strict=False):
                if value:
                    total[name] = total.get(name, 0) + 2 * value
        return [total.get(name) for name in NAMES]


NUMBERS = st.sampled_from([0.0, 1.0, 2.0, -3.0])
STEPS = st.builds(
    Step,
    runs=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=2).map(tuple),
    own=st.lists(st.tuples(st.sampled_from(NAMES), st.just(4.0)), max_size=2).map(tuple),
    is_first=st.booleans(),
)


@settings(max_examples=60)
@given(st.lists(st.tuples(STEPS, STEPS), min_size=2, max_size=5))
def test_means_whatever_pipelines_do(steps: list[tuple[Step, Step]]) -> None:
    """They call the forward differently often, and their steps use parameters themselves."""

    def train(peers: Peers) -> list[list[float | None]]:
        stage, found = OneStage(peers), []
        for pair in [(Step(((1.0, 1.0),)),) * 2, *steps]:  # after one run, one is expected
            step = pair[peers.pipeline]
            for is_now in (True, False):
                if step.is_first is is_now:
                    for name, value in step.own:
                        stage.add(name, value)
                if is_now:
                    for values in step.runs:
                        stage.run(values)
            found.append(stage.average())
        return found[1:]

    expected = [
        [
            None if mine is None and other is None else ((mine or 0) + (other or 0)) / 2
            for mine, other in zip(first.gradients(), second.gradients(), strict=True)
        ]
        for first, second in steps
    ]
    assert on_pipelines(2, train) == [expected, expected]


def test_means_begin_in_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the step before had one run; not in the first one, and not in a second run."""
    monkeypatch.setattr(reduction, "BUCKET_BYTES", 1)

    def train(peers: Peers) -> list[bool]:
        stage, begun = OneStage(peers), []
        for num_runs in (1, 1, 2, 1, 1):
            begun += [stage.run((1.0, 2.0)) for _ in range(num_runs)]
            assert stage.average() == [2.0 * num_runs, 4.0 * num_runs, None]
        return begun

    for begun in on_pipelines(2, train):
        assert begun == [False, True, True, False, False, True]


def test_losses_multiplied_alike() -> None:
    def train(peers: Peers) -> Any:
        stage = OneStage(peers)
        found = []
        for factor in (1.0, 0.5, 0.5):
            stage.run((1.0 + peers.pipeline, 2.0), factor)
            found.append(stage.average())
        return found

    once, half = [3.0, 4.0, None], [1.5, 2.0, None]
    assert on_pipelines(2, train) == 2 * [[once, half, half]]


def test_losses_multiplied_by_different_factors() -> None:
    def train(peers: Peers) -> None:
        stage = OneStage(peers)
        stage.run((1.0, 2.0))
        stage.average()
        stage.run((1.0, 2.0), factor=1.0 + peers.pipeline)
        stage.average()

    for error in on_pipelines(2, train):
        assert isinstance(error, NotImplementedError) and "different factors" in str(error)


def test_gradients_that_are_not_there_in_every_pipeline() -> None:
    """Missing in one they count as zeros, as in DDP; missing in all there is none."""

    def average(peers: Peers) -> Any:
        stage = OneStage(peers)
        stage.parameters["third"].requires_grad_(False)
        if peers.pipeline == 1:
            stage.add("first", 3.0)
        ends = stage.averaged.finish(is_asked_to_end=peers.pipeline == 0)
        return [p.grad is None for p in stage.parameters.values()], ends

    assert on_pipelines(2, average) == 2 * [([False, True, True], True)]


def test_sparse_gradients_are_refused() -> None:
    def average(peers: Peers) -> None:
        table = nn.Embedding(3, 2, sparse=True)
        table(torch.tensor([1])).sum().backward()
        averaged = AveragedGradients([table.weight], peers, lambda _: GradientReduction([], peers))
        averaged.finish(is_asked_to_end=False)

    for error in on_pipelines(2, average):
        assert isinstance(error, NotImplementedError) and "sparse=False" in str(error)
