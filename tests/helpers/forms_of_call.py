"""Modules whose forward is called in several forms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from helpers.models import INPUT_WIDTHS, NUM_TARGETS, WIDTH
from helpers.random_models import SupervisedModule


class Forms(SupervisedModule):
    """A chain of three layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(17)
        self.first = nn.Sequential(nn.Linear(INPUT_WIDTHS[0], WIDTH), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, NUM_TARGETS)


class LossInForward(Forms):
    """Computes its loss if it is given the targets, which validation does not do."""

    def forward(self, x: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        output = self.head(self.second(self.first(x)))
        return output, None if target is None else (output - target).square().mean()

    def step_loss(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        (x, *_), target = batch
        if self.training:
            output, loss = self(x, target)
            return loss, [output]
        output, _ = self(x)
        return (output - target).square().mean(), [output]


class Remembers(Forms):
    """Takes a state of the batch before, which the first one has not."""

    state: tuple[Tensor, Tensor] | None = None

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        first = self.first(x)
        if state is not None:
            first = first + state[0]
        second = self.second(first)
        if state is not None:
            second = second + state[1]
        return self.head(second), (first[:1], second[:1])

    def step_loss(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        (x, *_), target = batch
        output, state = self(x, self.state if self.training else None)
        if self.training:
            self.state = (state[0].detach(), state[1].detach())
        return (output - target).square().mean(), [output]


class Recurs(Remembers):
    """Takes the state of a recurrent layer, which has samples in its second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        second, state = self.second(self.first(x).unsqueeze(1), state)
        return self.head(second[:, 0]), state


class Flagged(Forms):
    """Has a layer that only training uses, behind a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(WIDTH, NUM_TARGETS)

    def forward(self, x: Tensor, *, twice: bool = False) -> Tensor:
        hidden = self.second(self.first(x))
        return self.head(hidden) + self.aside(hidden) if twice else self.head(hidden)

    def step_loss(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        (x, *_), target = batch
        output = self(x, twice=self.training)
        return (output - target).square().mean(), [output]


class ByMode(Flagged):
    """Has a layer that only training uses, as the mode says."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x))
        return self.head(hidden) + self.aside(hidden) if self.training else self.head(hidden)

    def step_loss(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        (x, *_), target = batch
        output = self(x)
        return (output - target).square().mean(), [output]


class NormalizedByMode(ByMode):
    """A layer of both modes has statistics, which only training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


class Normalized(Flagged):
    """The layer that only training uses has running statistics, and its gradient is also taken."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Sequential(nn.Linear(WIDTH, NUM_TARGETS), nn.BatchNorm1d(NUM_TARGETS))

    def step_loss(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        (x, *others), target = batch
        loss, outputs = super().step_loss(batch)
        if self.training:  # parameters get nothing of this one
            x = x.clone().requires_grad_()
            again, _ = super().step_loss(((x, *others), target))
            (slope,) = torch.autograd.grad(again, x)
            self.log("slope", slope.square().sum())
        return loss, outputs


class BothForms(LossInForward):
    """A step that calls the forward in both forms."""

    def step_loss(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        (x, *_), _ = batch
        with torch.no_grad():
            before, _ = self(x)
        loss, (output,) = super().step_loss(batch)
        with torch.no_grad():
            after, _ = self(x)
        return loss + (before - after).abs().sum(), [output]


class Numbered(Forms):
    """Is called with another number every time, which is no form of call."""

    calls = 0

    def forward(self, x: Tensor, scale: float) -> Tensor:
        return self.head(self.second(self.first(x))) * scale

    def step_loss(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        (x, *_), target = batch
        self.calls += 1
        output = self(x, 1 / self.calls)
        return (output - target).square().mean(), [output]


class LogsOtherRanksWeights(Forms):
    """Logs the norm of a layer that rank 0 does not hold."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))

    def step_loss(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        (x, *_), target = batch
        output = self(x)
        self.log("norm", self.first[0].weight.norm())
        return (output - target).square().mean(), [output]


class Alternating(Flagged):
    """Trains two steps with its layer aside, two without, and so on."""

    def step_loss(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        (x, *_), target = batch
        output = self(x, twice=self.training and self.global_step % 4 < 2)
        return (output - target).square().mean(), [output]


class Joined(Forms):
    """Two layers, whose weights training reads one by one, and validation together."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for _ in range(2))

    def forward(self, x: Tensor, *, joined: bool = False) -> Tensor:
        hidden = self.first(x)
        if joined:
            hidden = hidden @ torch.linalg.multi_dot([self.left, self.right])
        else:
            hidden = (hidden @ self.left) @ self.right
        return self.head(self.second(hidden))

    def step_loss(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        (x, *_), target = batch
        output = self(x, joined=not self.training)
        return (output - target).square().mean(), [output]
