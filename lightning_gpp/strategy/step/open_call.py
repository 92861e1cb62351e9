"""One call of the pipelined forward on one rank, from its forward to its backwards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lightning_gpp.runtime.gradients import GradientStash


class Halves(Protocol):
    """What runs in two halves."""

    def forward_half(self) -> None:
        """Everything before the loss."""

    def backward_half(self, *, retain: bool) -> None:
        """Everything after it."""


@dataclass(slots=True)
class OpenCall:
    """What a rank keeps of a call until its last backward.

    Attributes:
        run: of the program.
        stash: keeps gradients apart that parameters have already.
        recorded: what each of its parts runs in; whether it is the backward one.
        before_backward: called before backwards that are run once and give parameters gradients.
    """

    run: Halves
    stash: GradientStash
    recorded: Callable[[Any, bool], AbstractContextManager[None]]
    before_backward: Callable[[], None] = lambda: None

    def forward(self) -> None:
        """Runs all forwards."""
        with torch.enable_grad(), self.recorded(self.run, False):
            self.run.forward_half()

    def backward(self, *, retain: bool, hands_out: bool) -> None:
        """Runs all backwards.

        Args:
            retain: whether they can be run again.
            hands_out: whether the parameters get their gradients.
        """
        if hands_out and not retain:
            self.before_backward()
        with self.stash, torch.enable_grad(), self.recorded(self.run, True):
            self.run.backward_half(retain=retain)
        if hands_out:
            self.stash.hand_out()
        else:
            self.stash.discard()
