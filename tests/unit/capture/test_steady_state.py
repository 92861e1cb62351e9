"""Buffers that every forward changes alike are told from others, and put back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_gpp.capture import capture
from lightning_gpp.capture.checks.rollback import keep


class Counters(nn.Module):
    """Counts its calls in place and anew, its samples, and averages what it gets."""

    calls: Tensor
    halves: Tensor
    samples: Tensor
    constant: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm, self.weighing = nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=None)
        for name in ("calls", "halves", "samples", "constant"):
            self.register_buffer(name, torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.halves = self.halves + 0.5
        self.samples += x.shape[0]
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        hidden: Tensor = self.weighing(self.norm(self.layer(x)))
        return hidden * self.calls + self.constant


def test_which_buffers_depend_on_the_samples() -> None:
    for num_samples in (2, 5):  # of two samples there is no half that BatchNorm takes
        captured = capture(Counters(), (torch.randn(num_samples, 3),))
        assert captured.steady == {"calls", "halves", "norm.num_batches_tracked"}
        assert captured.unsteady == ["mean", "samples"]


def test_a_module_without_such_buffers() -> None:
    captured = capture(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), (torch.randn(4, 3),))
    assert not captured.changing and not captured.steady and not captured.unsteady
    assert captured.keeper([operator.name for operator in captured.graph]) is None


def test_kept_buffers_are_put_back() -> None:
    module = Counters()
    before = dict(module.named_buffers())
    put_back = keep(module, ["calls", "halves", "mean", "constant"])
    for _ in range(2):
        module(torch.randn(4, 3))
        module.mean.data.add_(1.0)
        put_back()
        after = dict(module.named_buffers())
        for name in ("calls", "halves", "mean", "constant"):
            assert after[name] is before[name]
            assert not after[name].any()
    assert module.constant._version == 0  # autograd may have saved it
    assert int(module.samples) == 8
