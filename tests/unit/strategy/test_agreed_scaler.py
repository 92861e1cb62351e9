"""When ranks agree on whether gradients are finite, with how many sums over them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from lightning_gpp.strategy.state.precision import AgreedScaler


class Ranks:
    """This rank, and another one that found as much in its gradients."""

    def __init__(self) -> None:
        self.told: list[list[float]] = []

    def total(self, numbers: Tensor) -> Tensor:
        self.told.append(numbers.tolist())
        return 2 * numbers


def unscaled(ranks: Ranks, *gradients: float) -> tuple[AgreedScaler, list[torch.optim.Optimizer]]:
    """A scaler that has unscaled the gradient of one optimizer each."""
    scaler = AgreedScaler.like(GradScaler("cpu", init_scale=4.0), torch.device("cpu"), ranks.total)
    scaler.scale(torch.ones(()))
    optimizers: list[torch.optim.Optimizer] = []
    for gradient in gradients:
        weight = nn.Parameter(torch.zeros(()))
        weight.grad = torch.tensor(gradient)
        optimizers.append(torch.optim.SGD([weight], lr=1.0))
        scaler.unscale_(optimizers[-1])
    return scaler, optimizers


@pytest.mark.parametrize(("gradient", "scale"), [(8.0, 4.0), (float("inf"), 2.0)])
def test_a_norm_and_what_was_found_are_one_sum(gradient: float, scale: float) -> None:
    ranks = Ranks()
    scaler, [optimizer] = unscaled(ranks, gradient)
    weight = optimizer.param_groups[0]["params"][0]
    assert scaler.squares(torch.tensor([3.0, 4.0])) == 50
    scaler.step(optimizer)
    scaler.update()
    assert ranks.told == [[25.0, float(scale == 2.0)]]
    assert (weight.item(), scaler.get_scale()) == (-2.0 if scale == 4.0 else 0.0, scale)


def test_without_a_norm_the_step_asks() -> None:
    ranks = Ranks()
    scaler, optimizers = unscaled(ranks, 8.0, 4.0)
    assert ranks.told == []
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert ranks.told == [[0.0, 0.0, 0.0]]


def test_what_no_step_follows_counts_for_the_scale() -> None:
    ranks = Ranks()
    scaler, _ = unscaled(ranks, 8.0, float("nan"))
    scaler.update()
    assert scaler.get_scale() == 2.0
