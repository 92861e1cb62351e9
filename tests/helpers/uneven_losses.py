"""Losses that are, or are not quite, means over the samples of a mini-batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from helpers.models import INPUT_WIDTHS, NUM_TARGETS, WIDTH, DataSpec
from helpers.random_models import SupervisedModule


class Tower(SupervisedModule):
    """A chain whose output every loss here is made of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.first = nn.Sequential(nn.Linear(INPUT_WIDTHS[0], WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, NUM_TARGETS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x))

    def step_loss(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        (x, *others), target = batch
        output = self(x)
        return self.loss_of(output, target, *others), [output]

    def loss_of(self, output: Tensor, target: Tensor, *others: Tensor) -> Tensor:
        """The mean squared error."""
        return (output - target).square().mean()


class TouchedTower(Tower):
    """Every sample is moved a little by the mean of all."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output + 1e-5 * output.mean(0)


class MovingTower(Tower):
    """Where a sample comes out depends on how many there are.

    Args:
        how: "halves" are shuffled into each other; "loop": likewise, by Python; "large": batches
            above eight are turned; "layer": batches above twelve are, by a sub-module.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.turn = how, Turn()

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if self.how == "halves":
            output = torch.stack(output.chunk(2), 1).flatten(0, 1)
        elif self.how == "loop":
            output = torch.stack([*output.unbind()[::2], *output.unbind()[1::2]])
        elif self.how == "layer":
            output = self.turn(output)
        elif len(x) > 8:
            output = torch.flipud(output)
        return output


class Turn(nn.Module):
    """Turns large batches."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.flipud(x) if len(x) > 12 else x


class BalancedTower(Tower):
    """With a small term that looks at the mean over the batch, as of a mixture of experts.

    Args:
        weight: of the term.
    """

    def __init__(self, weight: float = 1e-4) -> None:
        super().__init__()
        self.weight = weight

    def loss_of(self, output: Tensor, target: Tensor, *others: Tensor) -> Tensor:
        use = output.softmax(-1).mean(0)
        return super().loss_of(output, target) + self.weight * use.square().sum()


class MaskedTower(Tower):
    """The mean over the targets that a mask leaves."""

    def loss_of(self, output: Tensor, target: Tensor, *others: Tensor) -> Tensor:
        (mask,) = others
        return ((output - target).square() * mask).sum() / mask.sum()


class NoisyTower(Tower):
    """Adds noise to the targets."""

    def loss_of(self, output: Tensor, target: Tensor, *others: Tensor) -> Tensor:
        return super().loss_of(output, target + 0.1 * torch.randn_like(target))


class ProjectingTower(Tower):
    """Multiplies with a matrix in the step, and takes the logarithm of a softmax."""

    def loss_of(self, output: Tensor, target: Tensor, *others: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        matrix = torch.randn(NUM_TARGETS, 300, generator=generator).to(output)
        return nn.functional.cross_entropy(100 * output @ matrix, target.argmax(1))


class InnerLossTower(MaskedTower):
    """Takes the loss inside of the forward."""

    def forward(self, x: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        return MaskedTower.loss_of(self, self.head(self.first(x)), target, mask)

    def step_loss(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        (x, mask), target = batch
        loss = self(x, mask, target)
        return loss, [loss]


class MaskedData(DataSpec):
    """Masks that leave all targets until, from some batch on, they leave fewer of some samples."""

    first_masked = 2

    def loader(self) -> DataLoader[Any]:
        (x, *_), target = self.tensors()
        mask = torch.ones_like(target)
        mask[self.first_masked * self.batch_size :: 5, 1:] = 0
        samples = [((x[i], mask[i]), target[i]) for i in range(self.num_samples)]
        return DataLoader(samples, batch_size=self.batch_size)  # type: ignore[arg-type]


class UnmaskedData(MaskedData):
    """Masks that leave all targets."""

    first_masked = 1000


class PerSampleTower(Tower):
    """Returns a loss per sample, and the output that they are made of, which nobody uses."""

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        output = self.head(self.first(x))
        return (output - target).square().mean(1), output

    def step_loss(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        (x,), target = batch
        losses, _ = self(x, target)
        return losses.mean(), [losses]
