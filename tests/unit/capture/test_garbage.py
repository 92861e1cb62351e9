"""What capture and profiling leave behind: values as large as the model's own must go at once.

Autograd's graphs keep activations; a circle of references would keep them, on every rank, until
Python looks for circles, which a training loop that makes few objects may never make it do.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.capture import capture, profile_costs

WIDTH = 53
"""Of nothing else."""


class Plain(nn.Module):
    """What torch.fx traces."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Decides(Plain):
    """What only the concrete tracer traces."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if hidden.dim() == 3:
            return hidden
        return self.second(hidden)


class Branch(nn.Module):
    """What has to stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if len(x) > 4 else self.layer(x) + 0 * x.sum()


class Decided(Plain):
    """A part of it stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = Branch()

    def forward(self, x: Tensor) -> Tensor:
        return self.branch(super().forward(x))


@pytest.fixture(autouse=True)
def nobody_collects() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kind", [Plain, Decides, Decided])
def test_no_value_outlives_capture_and_profile(kind: type[Plain]) -> None:
    module, x = kind(), torch.randn(6, WIDTH)
    profile_costs(capture(module, (x,)), (x,), repeats=1)  # imports on the way make circles
    gc.collect()
    before = values()
    captured = capture(module, (x,))
    profile_costs(captured, (x,), repeats=1)
    assert values() <= before | {id(x)}


def values() -> set[int]:
    """Tensors as wide as those of the models here, by their place in memory."""
    return {id(each) for each in gc.get_objects() if type(each) is Tensor and is_wide(each)}


def is_wide(tensor: Tensor) -> bool:
    try:
        return tensor.shape[-1:] == (WIDTH,)
    except RuntimeError:  # another test's, of a transform that has ended
        return False
