"""Every policy trains as its definition says, with every optimizer, on chains and branches.

chain: 0 - 1 - 2 - 3        diamond:  0 < 1 > 3        skip: 0 - 1 - 2, and 0 - 2
                                         2
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.delayed_updates import train_delayed, train_one_behind
from helpers.stage_dags import ToyStages
from helpers.threads.start import of_ranks
from helpers.threads.transport import ThreadHub
from torch import Tensor, nn
from torch.optim import (
    SGD,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
)

from lightning_gpp.graph import FEED, StageEdge, StageGraph
from lightning_gpp.planner.base import HeldVersions
from lightning_gpp.runtime.executor import Executor, Run
from lightning_gpp.runtime.run_state import RunState
from lightning_gpp.schedule import ONE_F_ONE_B_ASYNC, Program, Windows, build_program, most_ahead
from lightning_gpp.schedule.schedules import in_flight_units
from lightning_gpp.schedule.windows import version_differences
from lightning_gpp.strategy.step.async_steps import WeightVersions
from lightning_gpp.weights.last_steps import LastSteps
from lightning_gpp.weights.policies import POLICIES, Place
from lightning_gpp.weights.versions import StageWeights

NUM_BATCHES = 14
EACH = [name for name, policy in POLICIES.items() if not policy.is_one_behind]
"""Policies that may update after every batch."""


def graph(pairs: list[tuple[int, int]]) -> StageGraph:
    feed = StageEdge(FEED, 0, ("x",), has_backward=False)
    edges = (feed, *(StageEdge(a, b, (f"v{a}",)) for a, b in pairs))
    return StageGraph(1 + max((b for _, b in pairs), default=0), edges)


GRAPHS = {
    "chain": graph([(0, 1), (1, 2), (2, 3)]),
    "diamond": graph([(0, 1), (0, 2), (1, 3), (2, 3)]),
    "skip": graph([(0, 1), (1, 2), (0, 2)]),
}


class Lion(Optimizer):
    """A user's own (Chen et al. 2023, arXiv 2302.06675): the sign of a mean that is not its state.

    It knows nothing of the package, so its last update is what changed.
    """

    def __init__(self, parameters: list[Tensor], lr: float, decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for own in group["params"]:
                mean = self.state[own].setdefault("mean", torch.zeros_like(own))
                own.mul_(1 - group["lr"] * group["decay"])
                own.sub_(group["lr"] * torch.sign(0.9 * mean + 0.1 * own.grad))
                mean.mul_(0.99).add_(own.grad, alpha=0.01)


OPTIMIZERS: Mapping[str, Callable[[list[Tensor]], Optimizer]] = {
    "sgd": lambda p: SGD(p, 0.1),
    "momentum": lambda p: SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "dampening": lambda p: SGD(p, 0.05, momentum=0.9, dampening=0.5),
    "nesterov": lambda p: SGD(p, 0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: Adam(p, 0.01, weight_decay=0.1),
    "amsgrad": lambda p: Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: AdamW(p, 0.01, weight_decay=0.1),
    "rmsprop": lambda p: RMSprop(p, 0.01),
    "rmsprop-momentum": lambda p: RMSprop(p, 0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: Adagrad(p, 0.05),
    "adamax": lambda p: Adamax(p, 0.01),
    "nadam": lambda p: NAdam(p, 0.01),
    "radam": lambda p: RAdam(p, 0.01),
    "lion": lambda p: Lion(p, 0.003, 0.1),
}


def batches(width: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randn(5, width, generator=generator, dtype=torch.float64) for _ in range(2))
        for _ in range(NUM_BATCHES)
    ]  # type: ignore[misc]


class Boundary:
    """Feeds batches; the loss is the mean square of what the last stage lacks of the target."""

    def __init__(self, data: list[tuple[Tensor, Tensor]], value: str, per_update: int = 1) -> None:
        self.data, self.value, self.per_update = data, value, per_update
        self.losses: list[float] = []

    def start(self, microbatch: int) -> dict[str, Tensor]:
        return {"x": self.data[microbatch][0]}

    def finish(self, microbatch: int, outputs: dict[str, Any]) -> Tensor:
        loss = (outputs[self.value] - self.data[microbatch][1]).square().mean()
        self.losses.append(loss.item())
        return loss / self.per_update


class CountedWeights(StageWeights):
    """Weights of a stage of which the copies are counted."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._copies: list[weakref.ref[Tensor]] = []

    @contextmanager
    def forward(self, place: Place) -> Iterator[Mapping[str, Tensor]]:
        with super().forward(place) as found:
            self._copies += map(weakref.ref, found.values())
            yield found

    def _keep_newest(self) -> None:
        newest = None if self._newest is None else self._newest()
        super()._keep_newest()
        for version in (newest, self._before):
            self._copies += map(weakref.ref, version.values.values() if version else ())

    @property
    def num_versions(self) -> int:
        """Copies of the weights that are alive, the parameters included."""
        one = sum(parameter.numel() for parameter in self._parameters.values())
        alive = [copy for ref in self._copies if (copy := ref()) is not None]
        held = {copy.data_ptr(): copy.numel() for copy in (*alive, *self._kept())}
        own = {parameter.data_ptr() for parameter in self._parameters.values()}
        copied = sum(numel for place, numel in held.items() if place not in own)
        return 1 + (round(copied / one) if one else 0)


def train(
    stages: StageGraph,
    toy: ToyStages,
    policy: str,
    make: Callable[[list[Tensor]], Optimizer],
    per_update: int = 1,
) -> tuple[list[float], dict[int, int]]:
    """The losses, and the most versions of its weights that a stage ever held."""
    count, hub = stages.num_stages, ThreadHub(stages.num_stages)
    boundary = Boundary(batches(), f"v{count - 1}", per_update)
    most = dict.fromkeys(range(count), 0)
    drains = POLICIES[policy].drains

    def work(stage: int) -> None:
        windows = Windows(lambda n: program(stages, n), most_ahead(stages))
        ahead = version_differences(windows.window(windows.most_ahead + 1, windows.most_ahead))
        own = toy.weights[f"w{stage}"]
        optimizer, state = make([own]), RunState()
        versions = WeightVersions(per_update=per_update)
        weights = CountedWeights(POLICIES[policy], {f"w{stage}": own}, [LastSteps(optimizer)])
        code = toy.code(stage)
        versioned = versions.stage(code.function, weights, ahead[stage], windows.most_ahead)

        def count_versions() -> None:
            most[stage] = max(most[stage], weights.num_versions)

        def function(values: Any, call: Any) -> Any:
            found = versioned(values, call)
            count_versions()
            return found

        executor = Executor(
            transport=hub.transport(stage),
            rank_of_device=range(count),
            stages={stage: replace(code, function=function)},
            output_names=(boundary.value,),
            timeout_s=100,
        )
        for number in range(NUM_BATCHES):
            since, left = (0, 0) if drains else (number, NUM_BATCHES - 1 - number)
            versions.first = number if drains else 0
            window = windows.window(since, left)
            run = Run(
                executor,
                window.program,
                [5] * window.program.num_microbatches,
                training=True,
                boundary=boundary if stage == count - 1 else None,
                state=state,
                shift=number - window.number,
            )
            run.window(window.number)
            if (number + 1) % per_update == 0 or number + 1 == NUM_BATCHES:
                optimizer.step()
                optimizer.zero_grad()
            count_versions()

    of_ranks(count, work, [mailbox.waits for mailbox in hub.mailboxes])
    return boundary.losses, most


def program(stages: StageGraph, count: int) -> Program:
    return build_program(
        stages,
        devices=range(stages.num_stages),
        num_microbatches=count,
        schedule=ONE_F_ONE_B_ASYNC,
    )


def assert_by_definition(
    shape: str, policy: str, optimizer: str, per_update: int = 1
) -> dict[int, int]:
    stages, make = GRAPHS[shape], OPTIMIZERS[optimizer]
    toy = ToyStages(stages)
    first = [toy.weights[f"w{stage}"].detach().clone() for stage in range(stages.num_stages)]
    if POLICIES[policy].is_one_behind:
        expected, trained = train_one_behind(stages, first, batches(), per_update, make)
    else:
        expected, trained = train_delayed(
            stages, first, batches(), policy, make, per_update=[per_update]
        )
    losses, most = train(stages, toy, policy, make, per_update)
    assert losses == pytest.approx(expected, rel=1e-12)
    for stage, weight in enumerate(trained):
        torch.testing.assert_close(
            toy.weights[f"w{stage}"].detach(), weight, rtol=1e-12, atol=1e-12
        )
    return most


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", EACH)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_policy_trains_as_defined(policy: str, optimizer: str) -> None:
    assert_by_definition("chain", policy, optimizer)


@pytest.mark.parametrize("policy", EACH)
@pytest.mark.parametrize("shape", ["diamond", "skip"])
def test_branches(policy: str, shape: str) -> None:
    assert_by_definition(shape, policy, "momentum")


@pytest.mark.parametrize("policy", [p for p in EACH if not POLICIES[p].why_not(2, 0)])
@pytest.mark.parametrize(
    ("shape", "optimizer", "per_update"), [("chain", "adam", 2), ("skip", "momentum", 4)]
)
def test_updates_of_several_batches(
    policy: str, shape: str, optimizer: str, per_update: int
) -> None:
    """The last update takes the batches that are left; versions are as many as are predicted."""
    most = assert_by_definition(shape, policy, optimizer, per_update)
    assert_held(most, shape, policy, per_update)
    if policy == "stash":  # not one per batch in flight, but one per update in flight
        assert most[0] == {2: 3, 4: 2}[per_update]


@pytest.mark.parametrize(
    ("shape", "optimizer", "per_update"),
    [("chain", "adam", 3), ("diamond", "momentum", 2), ("skip", "adamw", 4)],
)
def test_updates_that_are_one_behind(shape: str, optimizer: str, per_update: int) -> None:
    """2BW; of as many batches as the pipeline is ahead, or more."""
    most = assert_by_definition(shape, "2bw", optimizer, per_update)
    assert set(most.values()) == {2}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("per_update", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [
        *((name, "adam") for name in ("pipeoptim", "pipeoptim-release", "stash", "none")),
        *(("pipeoptim-at-predicted", name) for name in ("momentum", "adam")),
    ],
)
def test_versions_are_as_many_as_planners_expect(
    policy: str, optimizer: str, per_update: int
) -> None:
    most = assert_by_definition("chain", policy, optimizer, per_update)
    assert_held(most, "chain", policy, per_update)


def assert_held(most: dict[int, int], shape: str, policy: str, per_update: int) -> None:
    """A first stage, whose input takes no gradient, does not need its weights for the backward."""
    versions = HeldVersions(*POLICIES[policy].held_versions(per_update))
    depths = in_flight_units(GRAPHS[shape], [1] * GRAPHS[shape].num_stages)
    for stage, depth in depths.items():
        if stage or not versions.keeps_predictions:
            assert most[stage] == versions.of(depth)


def test_versions_that_are_alive() -> None:
    """PipeOptim needs two at most however deep the pipeline; stashing one per batch in flight."""
    assert assert_by_definition("chain", "pipeoptim", "adam") == {0: 2, 1: 2, 2: 2, 3: 1}
    assert assert_by_definition("chain", "stash", "adam") == {0: 4, 1: 3, 2: 2, 3: 1}
    assert assert_by_definition("chain", "pipeoptim-at-predicted", "adam")[1] == 5
    assert assert_by_definition("chain", "none", "adam") == dict.fromkeys(range(4), 1)


@pytest.mark.parametrize("policy", EACH)
def test_one_stage_is_ordinary_training(policy: str) -> None:
    """Bit for bit: nothing is in flight, and nothing is predicted but by the authors' release."""
    stages, make = graph([]), OPTIMIZERS["adam"]
    toy = ToyStages(stages)
    own = nn.Parameter(toy.weights["w0"].detach().clone())
    losses, _ = train(stages, toy, policy, make)
    optimizer, expected = make([own]), []
    for x, target in batches():
        optimizer.zero_grad()
        loss = (torch.tanh(torch.stack([x]).sum(0) @ own) - target).square().mean()
        loss.backward()
        expected.append(loss.item())
        optimizer.step()
    if policy == "pipeoptim-release":
        assert losses != expected
        return
    assert losses == expected
    assert torch.equal(toy.weights["w0"], own)
