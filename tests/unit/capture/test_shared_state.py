"""Parameters that are shared or used directly, and buffers that forward changes."""

from __future__ import annotations

import pytest
import torch
from pipelined import assert_partitions_exact, data
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("error")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mid(self.embed(x)))


def test_tied_weights_are_one_parameter() -> None:
    captured = assert_partitions_exact(Tied(), torch.randint(0, 7, (4, 3)))
    assert captured.graph.operator["embed"].parameters == ("embed.weight",)
    assert captured.graph.operator["head"].parameters == ("embed.weight", "head.bias")
    stage = captured.stage(["head"], ["mid"], ["head"])
    assert set(stage.parameter_names) == {"embed.weight", "head.bias"}


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.mid = inner, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.mid(self.inner(x)))


def test_module_called_twice() -> None:
    captured = assert_partitions_exact(Twice(nn.Linear(4, 4)), data(4, 4))
    assert [operator.name for operator in captured.graph] == ["inner", "mid", "inner_1"]
    assert captured.graph.operator["inner_1"].target == "inner"


def test_batch_norm_called_twice_stays_on_one_stage() -> None:
    captured = assert_partitions_exact(Twice(nn.BatchNorm1d(4)), data(6, 4))
    (operator,) = captured.graph.operators
    assert set(operator.state) == {
        f"inner.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }


def test_batch_norm_state_and_untouched_buffers() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    captured = assert_partitions_exact(module, data(6, 3))
    assert "1.running_mean" in captured.graph.operators[1].state
    assert captured.stage(
        [captured.graph.operators[1].name],
        captured.graph.operators[1].inputs,
        [captured.graph.operators[1].outputs[0].name],
    ).buffer_names == ("1.num_batches_tracked", "1.running_mean", "1.running_var")


class DirectParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.a = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)
        self.constant = torch.randn(4)
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.scale + self.constant + self.shift
        return self.a(h) * self.scale


def test_parameter_buffer_and_constant_used_directly() -> None:
    module = DirectParameter()
    captured = assert_partitions_exact(module, data(4, 4))
    readers = [o.name for o in captured.graph if "scale" in o.parameters]
    assert len(readers) == 2
    assert not hasattr(module, "_tensor_constant0")


class MovingAverage(nn.Module):
    """Replaces its buffer in every training forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.average = 0.9 * self.average + 0.1 * h.detach().mean(0)
        return h - self.average


def test_replaced_buffers_are_replaced_by_stages() -> None:
    captured = assert_partitions_exact(MovingAverage(), data(4, 4))
    states = [operator.state for operator in captured.graph if operator.state]
    assert states == [("average",)]
