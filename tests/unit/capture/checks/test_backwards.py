"""Backwards in which gradients of samples may meet, though forward keeps samples apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.capture import capture


class _Scaled(torch.autograd.Function):
    """Scales gradients, each by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -0.5 * gradients[0]


class _Normed(_Scaled):
    """Makes gradients of the batch of length one."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / gradients[0].norm()


class _Centred(_Scaled):
    """Takes the mean over the batch away, which is linear."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] - gradients[0].mean(0)


class Model(nn.Module):
    """Two layers, and a function between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.dropout, self.between = nn.Dropout(0.5), between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.dropout(self.first(x))))


class HooksGradients(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * 1
            x.register_hook(lambda gradient: gradient / gradient.norm())
        return x


def decision_of(model: nn.Module, num_samples: int = 4) -> str | None:
    return capture(model, (torch.randn(num_samples, 3),)).decision


@pytest.mark.parametrize("function", [_Scaled, _Normed, _Centred])
def test_the_backward_of_an_own_function(function: Any) -> None:
    decision = decision_of(Model(function.apply))
    if function is _Scaled:
        assert decision is None
    else:
        assert decision == f"gradients of samples may meet in the backward of {function.__name__}"


def test_one_sample_tells_nothing_of_an_own_function() -> None:
    assert "_Scaled" in (decision_of(Model(_Scaled.apply), num_samples=1) or "")


@pytest.mark.parametrize("kind", ["parameter", "accumulated", "module", "value"])
def test_hooks_on_gradients(kind: str) -> None:
    model = Model()
    if kind == "parameter":
        model.last.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    elif kind == "accumulated":
        model.last.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    elif kind == "module":
        model.last.register_full_backward_hook(lambda *_: None)
    else:
        model.between = HooksGradients()
    decision = decision_of(model) or ""
    where = {"module": "gradients of last", "value": "test_backwards.py:"}
    assert "hook" in decision and where.get(kind, "gradient of last.weight") in decision


def test_none_of_it() -> None:
    model = Model()
    model.first.register_forward_hook(lambda *_: None)
    assert decision_of(model) is None
