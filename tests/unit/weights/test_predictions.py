"""Predictions that are written over the last one are those that are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, NAdam, Optimizer, RMSprop

from lightning_gpp.weights.last_steps import LastSteps
from lightning_gpp.weights.policies import POLICIES, Place, Policy
from lightning_gpp.weights.versions import StageWeights

PLACE = Place(difference=2, ahead=2, most_ahead=3)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, 0.1, momentum=0.9),
        lambda p: Adam(p, 0.01),
        lambda p: Adam(p, 0.01, amsgrad=True),
        lambda p: RMSprop(p, 0.01, momentum=0.5),
        lambda p: NAdam(p, 0.01),
    ],
)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_prediction_into_memory_that_is_there(
    make: Callable[[list[Tensor]], Optimizer], is_transposed: bool
) -> None:
    torch.manual_seed(0)
    large = torch.randn(600, 300)  # more than is worked on at a time
    parameters = [nn.Parameter(large.t() if is_transposed else large), nn.Parameter(torch.ones(3))]
    optimizer = make(list(parameters))
    last_steps = LastSteps(optimizer)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    into: dict[Tensor, Tensor] = {
        parameter: torch.empty_like(parameter) for parameter in parameters
    }
    new, found = (last_steps.predicted(parameters, 3, where) for where in (None, into))
    for parameter in parameters:
        assert found[parameter] is into[parameter]
        assert not torch.equal(new[parameter], parameter)
        torch.testing.assert_close(found[parameter], new[parameter], rtol=1e-6, atol=1e-7)


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


def test_nothing_is_measured_where_nobody_predicts() -> None:
    own = nn.Parameter(torch.ones(3))
    optimizer = SGD([own], 0.1)
    last_steps = LastSteps(optimizer, are_asked_for=False)
    own.grad = torch.ones(3)
    optimizer.step()
    assert last_steps.predicted([own], 1) == {}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)
def test_which_policies_predict(policy: Policy) -> None:
    assert policy.predicts == (policy.name not in {"stash", "2bw", "flush", "none"})
