"""Stages asked for shapes: the same as from their operators, without running them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.capture import CapturedModel, capture
from lightning_gpp.emulation.shapes import ShapeStage
from lightning_gpp.runtime.stage_run import StageCall

META = torch.device("meta")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


def never(values: Sequence[Any], call: StageCall) -> Sequence[Any]:
    raise AssertionError("operators ran")


def stage_of(captured: CapturedModel, function: Any = None) -> ShapeStage:
    graph = captured.graph
    names = [item.value.name for item in graph.inputs]
    real = captured.stage([operator.name for operator in graph], names, graph.outputs)
    return ShapeStage(
        function or (lambda values, call: real(values, training=call.training)),
        graph,
        real.inputs,
        real.outputs,
        lambda: [captured.module.get_parameter(name) for name in real.parameter_names],
    )


@pytest.fixture
def captured() -> CapturedModel:
    return capture(Net().to(META), (torch.ones(6, 4, device=META),))


@pytest.mark.parametrize("samples", [6, 3, 12, 1])
def test_shapes_follow_the_samples(captured: CapturedModel, samples: int) -> None:
    x = torch.ones(samples, 4, device=META, requires_grad=True)
    (made,) = stage_of(captured, never)([x], StageCall())
    assert made.shape == (samples, 2) and made.is_meta and made.requires_grad
    made.sum().backward()
    parameters = dict(captured.module.named_parameters())
    for tensor in (x, parameters["body.weight"], parameters["body.bias"]):
        assert tensor.grad is not None and tensor.grad.shape == tensor.shape
    assert parameters["head.bias"].grad is None


def test_without_gradients_none_are_wanted(captured: CapturedModel) -> None:
    with torch.no_grad():
        (made,) = stage_of(captured, never)(
            [torch.ones(6, 4, device=META)], StageCall(training=False)
        )
    assert not made.requires_grad


def test_inputs_of_other_shapes_are_left_to_the_operators(captured: CapturedModel) -> None:
    (made,) = stage_of(captured)([torch.ones(6, 5, 4, device=META)], StageCall())
    assert made.shape == (6, 5, 2)
    with pytest.raises(AssertionError, match="operators ran"):
        stage_of(captured, never)([torch.ones(6, 5, 4, device=META)], StageCall())
