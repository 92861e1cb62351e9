"""What the check of a capture takes for rounding, and what for a fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.capture import capture
from lightning_gpp.capture.checks.check import Result
from lightning_gpp.capture.checks.rehearsal import Rehearsal
from lightning_gpp.capture.errors import CaptureError
from lightning_gpp.common import mapped_tensor


class Net(nn.Module):
    """A layer, and a buffer beside its parameters."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=dtype)
        self.register_buffer("shift", torch.ones(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.shift


def off_by(relative: float, *precisions: torch.dtype, part: str = "") -> Any:
    """Replays whose gradients differ in some precisions, in a part of the module."""
    replayed = Rehearsal.replayed

    def other(gradient: Any) -> Any:
        is_meant = gradient is not None and gradient.dtype in precisions
        return gradient * (1 + relative) if is_meant else gradient

    def wrapped(*args: Any, **kwargs: Any) -> tuple[Result, Any]:
        result, seen = replayed(*args, **kwargs)
        gradients = {
            name: other(value) if name.startswith(part) else value
            for name, value in result.gradients.items()
        }
        return replace(result, gradients=gradients), seen

    return wrapped


@pytest.fixture(params=[False, True], ids=["in memory", "in files"], autouse=True)
def is_in_files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Where the parameters of ``Net`` and their gradients lie."""
    if request.param:
        monkeypatch.setattr(mapped_tensor, "LEAST_BYTES", 1)
    return bool(request.param)


def net(dtype: torch.dtype = torch.float32) -> Net:
    with mapped_tensor.mapping_modules():
        return Net(dtype)


def test_a_small_gradient_among_large_ones_may_be_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = nn.Sequential(net(), Cancelling())
    monkeypatch.setattr(Rehearsal, "replayed", off_by(1e-3, torch.float32, part="1."))
    capture(module, (torch.randn(4, 3),))
    monkeypatch.setattr(Rehearsal, "replayed", off_by(1e-3, torch.float32))
    with pytest.raises(CaptureError, match=r"the gradient of '0\.layer.* differs by"):
        capture(module, (torch.randn(4, 3),))


def test_a_small_gradient_that_is_another_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rehearsal, "replayed", off_by(0.1, torch.float32, part="1."))
    with pytest.raises(CaptureError, match=r"the gradient of '1\.shift' differs by"):
        capture(nn.Sequential(net(), Cancelling()), (torch.randn(4, 3),))


class Cancelling(nn.Module):
    """Its parameter has a gradient of a millionth of others'."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-6 * self.shift


@pytest.mark.parametrize(
    ("relative", "precisions"),
    [
        (1e-3, (torch.float32, torch.float64)),
        (1e-3, (torch.float64,)),
        (0.1, (torch.float32,)),
    ],
)
def test_other_differences_are_faults(
    monkeypatch: pytest.MonkeyPatch, relative: float, precisions: tuple[torch.dtype, ...]
) -> None:
    monkeypatch.setattr(Rehearsal, "replayed", off_by(relative, *precisions))
    dtype = torch.float32 if torch.float32 in precisions else torch.float64
    module = net(dtype)
    with pytest.raises(CaptureError, match=r"the gradient of .* differs by"):
        capture(module, (torch.randn(4, 3, dtype=dtype),))
