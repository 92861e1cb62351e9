"""Where the pipeline meets the user's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor


class Boundary(Protocol):
    """Where the pipeline meets the user's step; only the rank of the loss needs one."""

    def start(self, microbatch: int) -> Mapping[str, Tensor]:
        """The arguments of the pipelined forward for one micro-batch of the loss stage."""

    def finish(self, microbatch: int, outputs: Mapping[str, Any]) -> Tensor | None:
        """Takes the model's outputs; returns the weighted loss where the backward starts at it.

        Without a loss the backward starts at the gradients of the outputs.
        """

    def output_gradients(self, microbatch: int) -> Mapping[str, Sequence[Tensor | None]]:
        """Output name -> gradients of its tensors, where :meth:`finish` gave no loss."""
        raise AssertionError("the backward of a micro-batch starts at its loss")
