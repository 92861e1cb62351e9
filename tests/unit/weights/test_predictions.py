"""Predictions that are written over the last one are those that are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RMSprop

from lightning_gpp.strategy.step.async_steps import WeightVersions
from lightning_gpp.weights.last_steps import LastSteps
from lightning_gpp.weights.policies import POLICIES, Place, Policy
from lightning_gpp.weights.versions import StageWeights

PLACE = Place(difference=2, ahead=2, most_ahead=3)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, 0.1, momentum=0.9),
        lambda p: Adam(p, 0.01, amsgrad=True),
        lambda p: AdamW(p, 0.01, weight_decay=0.5),
        lambda p: NAdam(p, 0.01),
        lambda p: RMSprop(p, 0.01, maximize=True),
        lambda p: RMSprop(p, 0.01, momentum=0.5, weight_decay=0.1, maximize=True),
    ],
)
def test_predictions_in_memory_that_is_there(
    make: Callable[[list[Tensor]], Optimizer], is_transposed: bool
) -> None:
    """Some distances one after the other, and a rate that changed: all by the last update."""
    torch.manual_seed(0)
    large = torch.randn(6, 3).double()
    one, two = nn.Parameter(large.t() if is_transposed else large), nn.Parameter(torch.ones(3))
    optimizer = make([one, two])
    last_steps = LastSteps(optimizer)
    assert last_steps.predicted([one, two], 1) == {}
    for has_gradient in (True, False):  # two is not updated any more
        before = one.detach().clone()
        one.grad = torch.randn_like(one)
        two.grad = torch.ones(3) if has_gradient else None
        optimizer.step()
    step = one.detach() - before
    for ahead, rate in ((2, 1.0), (5, 1.0), (5, 1.0), (1, 1.0), (3, 0.1)):
        optimizer.param_groups[0]["lr"] *= rate
        expected = one.detach() + ahead * rate * step
        for anew in (False, True):
            found = last_steps.predicted([one, two], ahead, anew=anew)
            torch.testing.assert_close(found[one], expected, rtol=1e-12, atol=1e-12)
            assert found[one].stride() == one.stride()
            held = {copy.data_ptr() for copy in last_steps.copies([one])}
            assert (found[one].data_ptr() in held) != anew and len(held) == 1
            assert not torch.equal(found[two], two)


@pytest.mark.parametrize(
    ("make", "is_known"),
    [
        (lambda p: SGD(p, 0.1, momentum=0.9, maximize=True), True),
        (lambda p: Adam(p, 0.01, weight_decay=0.5), True),
        (lambda p: Adam(p, 0.01, amsgrad=True, maximize=True), True),
        (lambda p: AdamW(p, 0.01, weight_decay=0.5), True),
        (lambda p: NAdam(p, 0.01), False),
        (lambda p: SGD(p, 0.1), False),
    ],
)
def test_what_is_forgotten_follows_from_some_states(
    make: Callable[[list[Tensor]], Optimizer], is_known: bool
) -> None:
    torch.manual_seed(0)
    own = nn.Parameter(torch.randn(5).double())
    optimizer = make([own])
    last_steps = LastSteps(optimizer)
    last_steps.predicted([own], 1)
    for _ in range(3):
        own.grad = torch.randn_like(own)
        before = own.detach().clone()
        optimizer.step()
    known = own.detach() + 2 * (own.detach() - before)
    last_steps.forget()
    found = last_steps.predicted([own], 2)
    if not is_known:
        assert found == {}
        return
    torch.testing.assert_close(found[own], known, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [lambda p: SGD(p, 0.1, momentum=0.9), lambda p: Adam(p, 0.01)])
def test_a_prediction_is_made_once_per_update(make: Callable[[list[Tensor]], Optimizer]) -> None:
    """However many forwards run with it; of another distance, or after an update, it is another."""
    own = nn.Parameter(torch.ones(3))
    optimizer = make([own])
    last_steps = LastSteps(optimizer)
    last_steps.predicted([own], 1)
    for _ in range(2):
        own.grad = torch.ones(3)
        optimizer.step()
        first = last_steps.predicted([own], 1)[own]
        version = first._version
        assert last_steps.predicted([own], 1)[own]._version == version
        assert last_steps.predicted([own], 2)[own]._version > version


def test_a_rate_of_nothing_moves_nothing() -> None:
    own = nn.Parameter(torch.ones(3))
    optimizer = Adam([own], 0.1)
    last_steps = LastSteps(optimizer)
    last_steps.predicted([own], 1)
    own.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.0
    assert last_steps.predicted([own], 2) == {}
    assert torch.equal(last_steps.predicted([own], 2, anew=True)[own], own)
    optimizer.param_groups[0]["lr"] = 0.1
    torch.testing.assert_close(last_steps.predicted([own], 2)[own], torch.full((3,), 0.7))


@pytest.mark.parametrize(
    "policy", ["pipeoptim", "spectrain", "pipeoptim-at-predicted", "stash", "none"]
)
def test_what_a_stage_hands_on_of_its_weights_stays(policy: str) -> None:
    """A view of weights, as of a table of positions, does not change with the next update."""
    own = nn.Parameter(torch.arange(4.0))
    optimizer = SGD([own], 0.1, momentum=0.9)
    weights = StageWeights(POLICIES[policy], {"own": own}, [LastSteps(optimizer)])

    def forward() -> Tensor:
        found = weights.forward(PLACE)
        with found.saving:
            handed_on: Tensor = weights.apart([found.weights["own"][:2]])[0]
        return handed_on

    seen = []
    for _ in range(4):
        handed_on = forward()
        seen.append((handed_on, handed_on.tolist()))
        own.grad = torch.ones_like(own)
        optimizer.step()
    assert [values for _, values in seen] == [tensor.tolist() for tensor, _ in seen]
    assert len({tuple(values) for _, values in seen}) == 4


def test_nothing_is_kept_of_what_nobody_asks_for() -> None:
    own, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = SGD([own, other], 0.1)
    last_steps = LastSteps(optimizer)
    last_steps.predicted([own], 1)
    own.grad, other.grad = torch.ones(3), torch.ones(3)
    optimizer.step()
    assert len(list(last_steps.copies([own, other]))) == 1
    assert last_steps.predicted([own, other], 1).keys() == {own}


@pytest.mark.parametrize("per_update", [1, 2, 3, 5])
def test_constant_gradients_are_predicted_exactly(per_update: int) -> None:
    """Plain SGD: every forward runs with the weights that its backward meets."""
    own, ahead, count = nn.Parameter(torch.zeros(3)), 3, 16
    optimizer = SGD([own], 0.5)
    weights = StageWeights(POLICIES["pipeoptim"], {"own": own}, [LastSteps(optimizer)])
    versions, used = WeightVersions(per_update=per_update), list[Tensor]()
    first_known = None
    for number in range(count):
        while len(used) <= min(number + ahead, count - 1):
            place = versions.place(len(used), ahead, ahead)
            used.append(weights.forward(place).weights["own"].detach().clone())
            if first_known is None and number >= per_update:
                first_known = len(used) - 1  # before that no update tells what the next does
        if first_known is not None and number >= first_known:
            assert torch.equal(used[number], own.detach())
        if (number + 1) % per_update == 0:
            own.grad = torch.ones(3)
            optimizer.step()
    assert torch.equal(own.detach(), torch.full((3,), -0.5 * (count // per_update)))
    assert first_known is not None and first_known < count - 2


@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)
def test_which_policies_predict(policy: Policy) -> None:
    assert policy.predicts == (policy.name not in {"stash", "2bw", "flush", "none"})
