"""Capturing and profiling leave no trace on the model."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.capture import capture, profile_costs


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        random.random(), np.random.rand()
        return x


class Stateful(nn.Module):
    """Changes everything that a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.draws = nn.BatchNorm1d(3), nn.Dropout(0.5), Draws()
        self.register_buffer("seen", torch.zeros(2))
        self.total = torch.zeros(3)
        self.calls, self.history, self.cache = 0, [0], {"a": 1}

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.norm(x))
        self.seen.add_(1)
        self.total += 1
        self.calls += 1
        self.history.append(self.calls)
        self.cache["b"] = self.calls
        self.new = "attribute"
        return self.draws(h * 2)


def snapshot(module: Stateful) -> list[object]:
    return [
        {name: tensor.clone() for name, tensor in module.state_dict().items()},
        {name: id(tensor) for name, tensor in module.named_buffers()},
        module.total.clone(),
        (module.calls, list(module.history), dict(module.cache), sorted(vars(module))),
        [(name, item.training) for name, item in module.named_modules()],
        torch.random.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # type: ignore[index]
        [parameter.grad for parameter in module.parameters()],
    ]


def assert_equal(before: list[object], after: list[object]) -> None:
    torch.testing.assert_close(before[0], after[0], rtol=0, atol=0)
    assert torch.equal(before[2], after[2])  # type: ignore[arg-type]
    assert torch.equal(before[5], after[5])  # type: ignore[arg-type]
    for position in (1, 3, 4, 6, 7, 8):
        assert before[position] == after[position]


def test_capture_and_profile_leave_the_module_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    module, x = Stateful(), torch.randn(4, 3)
    module.norm.eval()
    before = snapshot(module)
    with caplog.at_level(logging.WARNING):
        captured = capture(module, (x,), {})
    assert "forward changes" in caplog.text
    assert "calls" in caplog.text
    assert_equal(before, snapshot(module))
    profile_costs(captured, (x,), num_sizes=1)
    assert_equal(before, snapshot(module))


def test_existing_gradients_are_kept() -> None:
    module, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(4, 3)
    module(x).sum().backward()
    gradient = module[0].weight.grad
    assert gradient is not None
    kept = gradient.clone()
    profile_costs(capture(module, (x,), {}), (x,), num_sizes=1)
    assert module[0].weight.grad is gradient
    assert torch.equal(gradient, kept)


def test_failing_capture_restores_too() -> None:
    class Fails(Stateful):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if float(x.sum()) < 1e9 else x

    module, x = Fails(), torch.randn(4, 3)
    before = snapshot(module)
    with pytest.raises(ValueError, match="cannot be captured"):
        capture(module, (x,), {})
    assert_equal(before, snapshot(module))
