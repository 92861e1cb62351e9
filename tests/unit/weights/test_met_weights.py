"""A backward meets other weights than its forward, in every family of operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_gpp.weights.versions import meeting, routed

FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(4, 3), lambda: torch.randn(5, 4)),
    "embedding": (lambda: nn.Embedding(6, 4), lambda: torch.randint(0, 6, (5,))),
    "layer norm": (lambda: nn.LayerNorm(4), lambda: torch.randn(5, 4)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3), lambda: torch.randn(2, 2, 7)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3), lambda: torch.randn(2, 2, 5, 5)),
    "gru": (lambda: nn.GRU(4, 3, batch_first=True), lambda: torch.randn(2, 5, 4)),
    "prelu": (lambda: nn.PReLU(), lambda: torch.randn(5, 4)),
    "bilinear": (lambda: Bilinear(), lambda: torch.randn(5, 4)),
    "attention": (lambda: Attention(), lambda: torch.randn(2, 5, 4)),
}


class Bilinear(nn.Module):
    """Uses one weight twice, as a view and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight) * (x @ self.weight.T[:, :4]) * self.weight[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x, x, x, need_weights=False)[0]
        return out


def run(module: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    found = functional_call(module, weights, (x,))
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_the_weights_is_kept_and_the_same_weights_give_the_same_gradients(
    family: str,
) -> None:
    torch.manual_seed(0)
    make, data = FAMILIES[family]
    module, x = make().double(), data()
    if x.is_floating_point():
        x = x.double().requires_grad_()
    inputs = [x] if x.requires_grad else []
    expected = torch.autograd.grad(
        run(module, dict(module.named_parameters()), x).square().sum(),
        [*module.parameters(), *inputs],
    )
    kept = {name: p.detach().clone() for name, p in module.named_parameters()}
    weights = {n: routed(p.detach().clone(), p) for n, p in module.named_parameters()}
    with meeting(weights, lambda name: kept[name]):
        out = run(module, weights, x)
    for weight in weights.values():
        weight.untyped_storage().resize_(0)  # whoever kept it would crash or differ
    got = torch.autograd.grad(out.square().sum(), [*module.parameters(), *inputs])
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_linear_layer_meets_the_weights_of_the_backward() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 3).double(), torch.randn(5, 4).double().requires_grad_()
    later = torch.randn(3, 4).double()
    weights = {name: routed(p.detach().clone(), p) for name, p in layer.named_parameters()}
    with meeting(weights, {"weight": later, "bias": torch.zeros(3)}.__getitem__):
        out = run(layer, weights, x)
    gradient = torch.randn(5, 3).double()
    (of_x,) = torch.autograd.grad(out, [x], gradient)
    torch.testing.assert_close(of_x, gradient @ later, rtol=1e-12, atol=1e-12)


def test_casts_are_refused() -> None:
    layer = nn.Linear(4, 3)
    weights = {name: routed(p.detach().clone(), p) for name, p in layer.named_parameters()}
    with (
        pytest.raises(NotImplementedError, match="in half precision with weights of another type"),
        torch.autocast("cpu", torch.bfloat16),
        meeting(weights, weights.__getitem__),
    ):
        run(layer, weights, torch.randn(5, 4, requires_grad=True))
