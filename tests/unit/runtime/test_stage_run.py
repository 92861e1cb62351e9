"""A stage that recomputes keeps its inputs alone, and gives the same gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_gpp.runtime.stage_run import Flight, StageCall, StageCode, run_forward


class Layers:
    """Four wide layers with dropout as the function of a stage."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.5)) for _ in range(4)]
        self.module = nn.Sequential(*blocks)
        self.calls = 0

    def __call__(self, values: Sequence[Any], call: StageCall) -> list[Tensor]:
        self.calls += 1
        return [self.module.train(call.training)(values[0])]


def fly(layers: Layers, *, recompute: bool, x: Tensor) -> tuple[Flight, int]:
    """The flight of one micro-batch, and the bytes that autograd saved for its backward."""
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.nbytes)
        return tensor

    torch.manual_seed(1)
    code = StageCode(layers, ("x",), ("y",), recompute)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        flight = run_forward(code, {"x": x}, StageCall(), has_backward=True)
    return flight, sum(saved)


def gradients(layers: Layers, *, recompute: bool) -> list[Tensor]:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(2)).requires_grad_()
    flight, _ = fly(layers, recompute=recompute, x=x)
    flight.let_go()
    torch.manual_seed(99)  # what other stages draw in between must not matter
    flight.add_gradients(flight.ends["y"], [torch.ones(8, 16)])
    flight.backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in layers.module.parameters() if p.grad is not None)]


def test_gradients_are_the_same_with_dropout():
    layers = Layers()
    kept = [gradient.clone() for gradient in gradients(layers, recompute=False)]
    assert layers.calls == 1
    layers.module.zero_grad()
    again = gradients(layers, recompute=True)
    assert layers.calls == 1 + 2
    assert len(again) == len(kept) == 1 + 8
    for one, other in zip(kept, again, strict=True):
        assert torch.equal(one, other)


def test_nothing_but_inputs_is_kept():
    layers = Layers()
    x = torch.randn(8, 16).requires_grad_()
    _, kept = fly(layers, recompute=False, x=x)
    _, recomputed = fly(layers, recompute=True, x=x)
    assert kept > 8 * x.nbytes
    assert recomputed == x.nbytes
