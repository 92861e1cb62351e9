"""A state that a step carries from batch to batch cannot go through micro-batches.

Truncated backpropagation through time keeps ``self.hidden`` between batches: sample *i* of a batch
goes on where sample *i* of the batch before ended. The next micro-batch holds other samples, and
starts before the state is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils import _pytree as pytree


class Call(Protocol):
    """The arguments of a forward."""

    @property
    def args(self) -> tuple[Any, ...]:
        """By position."""

    @property
    def kwargs(self) -> dict[str, Any]:
        """By name."""


def carried_attributes(module: nn.Module, call: Call) -> dict[str, Any]:
    """The module's plain attributes whose tensors are among the arguments of a forward."""
    passed = {id(leaf) for leaf in _tensors((call.args, call.kwargs))}
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and any(id(leaf) in passed for leaf in _tensors(value))
    }


def refuse_carried_state(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    """Checks that a step left the attributes that it passed to its forward as they were.

    Raises:
        RuntimeError: it set one anew.
    """
    for name, before in attributes.items():
        if getattr(module, name, None) is not before:
            raise RuntimeError(
                f"training_step passes self.{name} to the pipelined forward and sets it anew: a "
                "state that goes on from batch to batch, which micro-batches of other samples mix "
                "up. Use num_microbatches=1."
            )


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
