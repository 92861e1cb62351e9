"""How fast a device goes through a program: as fast as it can, unless it has a pace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class ProgramPace(Protocol):
    """Is told what a device does in a program, in order; may let time pass."""

    def passed(self, instruction: int, *, is_backward: bool) -> None:
        """The forward of an instruction is over, or its backward begins, on all devices alike."""

    def begin_sum(self, size_bytes: int) -> Callable[[], None]:
        """A bucket of gradients is full; what is returned is called where its sum is needed."""

    def end_half(self) -> None:
        """The forward, or the backward, of the whole program is over."""


class _Told(torch.autograd.Function):
    """The same tensors; tells a pace when their gradients are there."""

    @staticmethod
    def forward(
        ctx: Any, pace: ProgramPace, instruction: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.told = pace, instruction
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        pace, instruction = ctx.told
        pace.passed(instruction, is_backward=True)
        return (None, None, *gradients)


def told(pace: ProgramPace, instruction: int, made: Sequence[Tensor]) -> list[Tensor]:
    """What an instruction made, when it has made it; the pace is told of its backward, too."""
    pace.passed(instruction, is_backward=False)
    places = [place for place, tensor in enumerate(made) if tensor.requires_grad]
    found = list(made)
    if places:
        through = _Told.apply(pace, instruction, *(made[place] for place in places))  # type: ignore[no-untyped-call]
        for place, tensor in zip(places, through, strict=True):
            found[place] = tensor
    return found
