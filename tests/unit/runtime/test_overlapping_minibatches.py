"""Mini-batches without draining in between: weights as the definition says.

An experiment that shows that an order which does not flush is one more value of a schedule. Every
micro-batch runs forward with the newest weights of its stage; its backward meets the same ones
(weight stashing, PipeDream, SOSP 2019, section 3.3), however often they were updated in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.stage_dags import ToyBoundary, ToyStages, is_drained
from helpers.threads.transport import ThreadHub
from torch import Tensor

from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.runtime.executor import Executor
from lightning_gpp.runtime.run_state import RunState
from lightning_gpp.runtime.stage_run import StageCall, StageCode
from lightning_gpp.schedule import (
    ONE_F_ONE_B_ASYNC,
    Kind,
    Program,
    Windows,
    build_program,
    most_ahead,
)

LEARNING_RATE = 0.5
DIAMOND = StageGraph(
    4,
    (
        StageEdge(FEED, 0, ("x",), has_backward=False),
        *(StageEdge(a, b, (f"v{a}",)) for a, b in [(0, 1), (0, 2), (1, 3), (2, 3)]),
    ),
)


class Stashing:
    """Weights of one stage: versions for forwards, plain gradient descent for updates."""

    def __init__(self, toy: ToyStages, stage: int) -> None:
        self.name = f"w{stage}"
        self.weights = toy.weights

    def stashed(self, code: StageCode) -> StageCode:
        """The stage with a copy of today's weights, whose gradient goes to the parameter itself."""

        def function(values: Sequence[Any], call: StageCall) -> Sequence[Any]:
            own = self.weights[self.name]
            copy = {self.name: own + torch.zeros_like(own)}
            return code.function(values, replace(call, weights=copy))

        return replace(code, function=function)

    def update(self) -> None:
        own = self.weights[self.name]
        assert own.grad is not None
        with torch.no_grad():
            own.sub_(LEARNING_RATE * own.grad)  # in place, as optimizers do
        own.grad = None


def run_threads(work: Callable[[int], None], count: int) -> None:
    """Runs something for every stage at once."""
    threads = [threading.Thread(target=work, args=(stage,)) for stage in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def by_definition(
    program: Program, toy: ToyStages, x: Tensor, num_samples: int | None = None
) -> list[float]:
    """The same training in one thread, from the versions that the program's order gives.

    Args:
        program: of all mini-batches.
        toy: gets the trained weights.
        x: the samples.
        num_samples: by which losses are divided; those of ``x`` if not given.

    Returns:
        The loss of every micro-batch.
    """
    num_stages, count = program.num_stages, program.num_microbatches
    per_minibatch = count // program.num_minibatches
    versions = [[toy.weights[f"w{stage}"].detach().clone()] for stage in range(num_stages)]
    version_of: dict[tuple[int, int], int] = {}
    for actions in program.actions:
        updates = 0
        for action in actions:
            updates += action.kind is Kind.STEP
            if action.kind is Kind.FORWARD:
                version_of[action.stage, action.microbatch] = updates
    losses = []
    for minibatch in range(program.num_minibatches):
        gradients = [torch.zeros_like(found[0]) for found in versions]
        for microbatch in range(minibatch * per_minibatch, (minibatch + 1) * per_minibatch):
            used = [
                versions[s][version_of[s, microbatch]].clone().requires_grad_()
                for s in range(num_stages)
            ]
            part = x[2 * microbatch : 2 * microbatch + 2]
            values = {"x": part}
            for stage in range(num_stages):
                names = [v for e in program.edges if e.target == stage for v in e.values]
                total = torch.stack([values[name] for name in names]).sum(0)
                values[f"v{stage}"] = torch.tanh(total @ used[stage])
            loss = values[f"v{num_stages - 1}"].square().mean() * 2 / (num_samples or len(x))
            losses.append(loss.item())
            for gradient, found in zip(gradients, torch.autograd.grad(loss, used)):
                gradient += found
        for stage, gradient in enumerate(gradients):
            versions[stage].append(versions[stage][-1] - LEARNING_RATE * gradient)
    for stage in range(num_stages):
        toy.weights[f"w{stage}"].data.copy_(versions[stage][-1])
    return losses


def train_in_windows(
    toy: ToyStages, x: Tensor, count: int, drops_after: int | None = None, *, stashes: bool = True
) -> list[float]:
    """One run of a window per mini-batch, as a loop outside asks for them; one thread per stage."""
    stages = toy.stages
    hub, errors = ThreadHub(stages.num_stages), list[BaseException]()
    boundary = ToyBoundary(x, [2] * count, f"v{stages.num_stages - 1}")

    def work(stage: int) -> None:
        stashing, state, code = Stashing(toy, stage), RunState(), toy.code(stage)
        executor = Executor(
            transport=hub.transport(stage),
            rank_of_device=range(stages.num_stages),
            stages={stage: stashing.stashed(code) if stashes else code},
            output_names=(f"v{stages.num_stages - 1}",),
            timeout_s=20,
        )
        mine = boundary if stage == stages.num_stages - 1 else None
        windows, since = Windows(asynchronous, most_ahead(stages)), 0
        try:
            for number in range(count):
                window = windows.window(since, count - 1 - number)
                sizes, shift = [2] * window.program.num_microbatches, number - window.number
                run = executor.begin(
                    window.program, sizes, training=True, boundary=mine, state=state, shift=shift
                )
                run.window(window.number)
                stashing.update()
                since += 1
                if number == drops_after:
                    run.drop_ahead(window.number)
                    assert is_drained(state)
                    since = 0
            assert is_drained(state)
            assert not hub.mailboxes[stage]._messages
        except BaseException as error:
            errors.append(error)
            for mailbox in hub.mailboxes:
                mailbox.waits.abort(error)

    run_threads(work, stages.num_stages)
    if errors:
        raise errors[0]
    return boundary.losses


def asynchronous(count: int) -> Program:
    return build_program(
        DIAMOND,
        devices=range(4),
        num_microbatches=count,
        schedule=ONE_F_ONE_B_ASYNC,
    )


@pytest.mark.parametrize("drops_after", [None, 0, 3, 6])
def test_a_loop_that_asks_for_windows_trains_as_the_program(drops_after: int | None) -> None:
    """What is in flight outlives the run; dropped, it leaves no trace but weights of the moment."""
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(3)).double()
    toy, reference = ToyStages(DIAMOND), ToyStages(DIAMOND)
    losses = train_in_windows(toy, x, 8, drops_after)
    first = 8 if drops_after is None else drops_after + 1
    expected = by_definition(asynchronous(first), reference, x[: 2 * first], 16)
    if first < 8:
        expected += by_definition(asynchronous(8 - first), reference, x[2 * first :], 16)
    assert losses[:first] == pytest.approx(expected[:first], rel=1e-12)
    for name, weight in toy.weights.items():
        torch.testing.assert_close(weight, reference.weights[name], rtol=1e-12, atol=1e-12)


def test_without_versions_autograd_refuses() -> None:
    """An update between forward and backward is an error and no silent mixture."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train_in_windows(ToyStages(DIAMOND), torch.ones(4, 3).double(), 2, stashes=False)


def test_windows_are_needed() -> None:
    executor = Executor(ThreadHub(4).transport(0), range(4), {})
    with pytest.raises(ValueError, match="several mini-batches runs in windows"):
        executor.begin(asynchronous(2), [1, 1], training=True).whole()
