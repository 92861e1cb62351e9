"""Predictions that are written over the last one are those that are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_gpp.weights.last_steps import LastSteps
from lightning_gpp.weights.policies import POLICIES, Place
from lightning_gpp.weights.versions import StageWeights

PLACE = Place(difference=2, ahead=2, most_ahead=3)


@pytest.mark.parametrize(
    "policy", ["pipeoptim", "spectrain", "pipeoptim-at-predicted", "stash", "none"]
)
def test_what_a_stage_hands_on_of_its_weights_stays(policy: str) -> None:
    """A view of weights, as of a table of positions, does not change with the next update."""
    own = nn.Parameter(torch.arange(4.0))
    optimizer = SGD([own], 0.1, momentum=0.9)
    weights = StageWeights(POLICIES[policy], {"own": own}, [LastSteps(optimizer)])

    def forward() -> Tensor:
        with weights.forward(PLACE) as found:
            handed_on: Tensor = weights.apart([found["own"][:2]])[0]
        return handed_on

    seen = []
    for _ in range(4):
        handed_on = forward()
        seen.append((handed_on, handed_on.tolist()))
        own.grad = torch.ones_like(own)
        optimizer.step()
    assert [values for _, values in seen] == [tensor.tolist() for tensor, _ in seen]
    assert len({tuple(values) for _, values in seen}) == 4
