"""A stage runs with other weights than its modules hold, and its backward meets the same.

Exchanging the data of parameters between forward and backward is a trap: some operators' backwards
then use the old values (linear layers) and others silently the new ones (convolutions, norms).
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_gpp.capture import capture


class Scaled(nn.Module):
    """A bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).tanh()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.heads(x, x, x, need_weights=False)[0]


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x.abs().mul(3).long().clamp(max=8)).sum(-2)).square()


class Tied(nn.Module):
    """One parameter at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).square()


class Turned(nn.Module):
    """Convolutions take the features first."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).square()


FAMILIES = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)),
    "convolution": lambda: Turned(nn.Conv1d(6, 6, 3)),
    "transposed convolution": lambda: Turned(nn.ConvTranspose1d(6, 6, 3)),
    "layer norm": lambda: nn.Sequential(nn.LayerNorm(6), nn.Tanh()),
    "group norm": lambda: Turned(nn.GroupNorm(2, 6)),
    "batch norm": lambda: Turned(nn.BatchNorm1d(6)),
    "recurrent": Recurrent,
    "attention": Attention,
    "transformer layer": lambda: nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True),
    "embedding": Embedded,
    "learned slope": lambda: nn.Sequential(nn.Linear(6, 6), nn.PReLU()),
    "bare parameter": Scaled,
    "tied": Tied,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_backward_meets_the_weights_of_its_forward(family: str) -> None:
    torch.manual_seed(0)
    module = FAMILIES[family]().double()
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    captured = capture(module, (x,))
    graph = captured.graph
    stage = captured.stage([op.name for op in graph], [graph.inputs[0].value.name], graph.outputs)
    assert stage.parameter_names
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.3).add_(0.1)
    expected = other(x)
    expected.square().sum().backward()
    wanted = {name: parameter.grad for name, parameter in other.named_parameters()}

    weights = {
        name: other.get_parameter(name).detach().clone().requires_grad_()
        for name in stage.parameter_names
    }
    held = {name: value.detach().clone() for name, value in module.named_parameters()}
    (made,) = stage([x.clone()], training=True, weights=weights)
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():  # what the modules hold changes before the backward
        for parameter in module.parameters():
            parameter.mul_(-2.0)
    made.square().sum().backward()
    for name, weight in weights.items():
        torch.testing.assert_close(weight.grad, wanted[name], rtol=1e-10, atol=1e-12)
    for name, parameter in module.named_parameters():  # and they still hold their own
        assert parameter.grad is None
        torch.testing.assert_close(parameter.detach(), held[name] * -2.0)


def test_exchanged_data_give_silently_other_gradients() -> None:
    """Why stage calls get weights: the trap itself."""
    found = {}
    for name, layer in (("linear", nn.Linear(6, 6)), ("norm", nn.LayerNorm(6))):
        x = torch.randn(4, 6, requires_grad=True)
        y = layer(x)
        before = torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0]
        layer.weight.data = layer.weight.data * 3.0
        after = torch.autograd.grad(y.square().sum(), x)[0]
        found[name] = torch.allclose(before, after)
    assert found == {"linear": True, "norm": False}


def test_a_name_that_the_stage_does_not_read_is_an_error() -> None:
    captured = capture(nn.Linear(6, 6), (torch.ones(2, 6),))
    graph = captured.graph
    stage = captured.stage([op.name for op in graph], [graph.inputs[0].value.name], graph.outputs)
    with pytest.raises(KeyError, match="nothing"):
        stage([torch.ones(2, 6)], training=True, weights={"nothing": torch.ones(1)})
