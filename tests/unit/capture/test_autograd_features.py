"""Custom autograd functions, checkpointing and autocast inside of forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipelined import assert_partitions_exact, data
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.filterwarnings("error")


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = Straight.apply(self.a(x))
        with torch.no_grad():
            target = self.b(h).softmax(1)
        return (self.b(h) * target).sum(1)


def test_custom_autograd_function_and_no_grad_regions() -> None:
    assert_partitions_exact(Custom(), data(4, 4))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.a, self.b = reentrant, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(
            lambda h: self.b(self.a(h).relu()), x, use_reentrant=self.reentrant
        )


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_parts_are_looked_into(reentrant: bool) -> None:
    captured = assert_partitions_exact(Checkpointed(reentrant), data(4, 4, grad=True))
    assert len(captured.graph) == 3


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.a(x) @ self.b.weight
        return self.b(h.float())


def test_autocast_inside_of_forward() -> None:
    captured = assert_partitions_exact(Autocast(), data(4, 4))
    assert captured.graph.values["a"].tensors[0].dtype == "bfloat16"


class ChosenAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)[:, None]
        with sdpa_kernel(SDPBackend.MATH):
            return nn.functional.scaled_dot_product_attention(h, h, h)[:, 0]


class Called(TorchDispatchMode):
    """Names of the operators that are called in it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_attention_runs_with_the_kernels_that_forward_chooses_of() -> None:
    captured = assert_partitions_exact(ChosenAttention(), data(4, 4))
    names = [operator.name for operator in captured.graph]
    stage = captured.stage(names, ["x"], captured.graph.outputs)
    with Called() as called:
        stage([data(4, 4)[0]], training=True)
    assert "aten._softmax.default" in called.names or "aten._safe_softmax.default" in called.names
    assert not any("flash" in name for name in called.names)
