"""The loss in what the user's training step returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

OR_ONCE = "or use schedule='gpipe', which runs the step once on the whole batch"


def loss_in(result: Any) -> Any:
    """What a step returned as its loss, if it did."""
    return result.get("loss") if isinstance(result, Mapping) else result


def with_loss(result: Any, loss: Tensor) -> Any:
    """What a step returned, with another loss."""
    return {**result, "loss": loss} if isinstance(result, Mapping) else loss


def check_is_here(loss: Tensor, *, is_shape_only: bool) -> None:
    """Raises RuntimeError, with the remedy, where a loss depends on what other ranks hold."""
    if loss.is_meta and not is_shape_only:
        raise RuntimeError(
            "the loss depends on parameters that another rank holds (a penalty over "
            "self.parameters(), say). Use the optimizer's weight_decay, or compute it inside the "
            "pipelined forward."
        )


def microbatch_loss(result: Any, *, is_shape_only: bool = False) -> Tensor:
    """The loss that a step returned for a micro-batch, which its backward can start from.

    Raises:
        TypeError, RuntimeError, ValueError: it is none; the text says why.
    """
    loss = loss_in(result)
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"training_step returned {type(result).__name__} for a micro-batch; with the schedule "
            f"'1f1b' it has to return a loss tensor or a dict with the key 'loss', {OR_ONCE}"
        )
    check_is_here(loss, is_shape_only=is_shape_only)
    if loss.numel() != 1:
        raise ValueError(
            f"the loss of a micro-batch has shape {tuple(loss.shape)}; expected one number"
        )
    if not loss.requires_grad:
        raise RuntimeError(
            "the loss that training_step returned requires no gradient, so nothing would be "
            "trained; was it made under torch.no_grad(), detached, or are all parameters frozen?"
        )
    return loss.reshape(())
