"""The private names of torch that the pipelined call needs do what their docstrings say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_gpp.strategy.lightning_private import (
    innermost_function_mode,
    keeps_graph,
    when_backward_ends,
    will_reach,
)
from lightning_gpp.strategy.state.held_elsewhere import HeldElsewhere, lifted


class Looking(torch.autograd.Function):
    """Notes what a backward says of itself."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, x: Tensor, notes: list[Any]) -> Tensor:
        ctx.leaf, ctx.notes = leaf, notes
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        ctx.notes.append((keeps_graph(), will_reach(ctx.leaf)))
        when_backward_ends(lambda: ctx.notes.append("end"))
        return None, 2 * gradient, None


class Last(torch.autograd.Function):
    """Comes after :class:`Looking` in a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, notes: list[Any]) -> Tensor:
        ctx.notes = notes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.notes.append("last")
        return gradient, None


def test_what_a_backward_says_of_itself() -> None:
    leaf, x = torch.zeros((), requires_grad=True), torch.ones(2, requires_grad=True)
    notes: list[Any] = []
    loss = Looking.apply(leaf, Last.apply(x, notes), notes).sum()
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    expected = [(True, True), (True, False), (False, True)]
    assert notes == [note for each in expected for note in (each, "last", "end")]


def test_the_mode_of_user_code_is_lifted_for_stages() -> None:
    assert innermost_function_mode() is None
    with lifted():
        assert innermost_function_mode() is None
    device = torch.device("cpu")
    with HeldElsewhere(device) as mode:
        assert innermost_function_mode() is mode
        with lifted():
            assert innermost_function_mode() is None
        assert innermost_function_mode() is mode
        with torch.device("cpu") as other, lifted():  # another mode inside stays
            assert innermost_function_mode() is not mode, other
    assert innermost_function_mode() is None
